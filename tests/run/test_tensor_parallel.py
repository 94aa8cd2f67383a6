"""Law: stages that are divided over tensor ranks train like one process, whatever else the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from asked_methods import CLIPS
from pool import WorkerPool
from small_jobs import SEED, descent, make_program, make_runtime, tiny
from tensor_jobs import DividedLoss, divisible, samples_of, tensor_plan, whole_loss, whole_parameters

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.compile import compile_evaluation_part
from weft.predict.cost.memory import stage_kept_bytes
from weft.program.rank_program import part_of
from weft.program.verify import require_valid
from weft.run.failures import PeerLostError
from weft.run.runtime import RankRuntime
from weft.run.stages import build_stage
from weft.run.tensor_parallel import TensorRanks
from weft.run.transport import HostGroup

pytestmark = pytest.mark.processes

STEPS = 2
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def alone(rank: int, ranks: int, config: ModelConfig, plan: Plan, clip_norm: float | None) -> Outcome:
    """One process that accumulates the micro-batches in their order."""
    model = build_stage(config, range(config.layers + 2), SEED, torch.float64)
    optimizer, losses = descent(model), []
    for step in range(STEPS):
        batch, total = samples_of(config, plan, step), 0.0
        for number in range(plan.micro_batches):
            inputs, targets = batch(number)
            loss = whole_loss(model(inputs), targets) / plan.micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, clip_norm: float | None, divided_loss: bool
) -> Outcome:
    loss = DividedLoss() if divided_loss else whole_loss
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=loss, clip_norm=clip_norm)
    losses = [runtime.step(step, samples_of(config, plan, step)).loss for step in range(STEPS)]
    parameters = whole_parameters(runtime)
    runtime.close()
    return losses, parameters


def require_equal(
    pool: WorkerPool,
    config: ModelConfig,
    plan: Plan,
    *,
    clip_norm: float | None = None,
    divided_loss: bool = True,
) -> None:
    require_valid(make_program(config, plan))
    [(expected_losses, expected)] = pool.run(alone, config, plan, clip_norm, ranks=1)
    seen: set[str] = set()
    for losses, parameters in pool.run(train, config, plan, clip_norm, divided_loss, ranks=plan.ranks):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)
        seen |= set(parameters)
    assert seen == set(expected)


@pytest.mark.parametrize("sequence", [8, 7], ids=["stream divided", "stream whole"])
@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "vit"])
def test_two_tensor_ranks_train_like_one_process(worker_pool: WorkerPool, family: str, sequence: int) -> None:
    config = divisible(family, sequence=sequence)
    require_equal(worker_pool, config, tensor_plan(config))


@pytest.mark.parametrize(
    ("family", "options", "sharding"),
    [
        ("gpt", {"pp": 2, "schedule": "1f1b"}, "zero-0"),
        ("vit", {"pp": 2, "schedule": "1f1b"}, "zero-0"),
        ("llama", {"dp": 2}, "zero-0"),
        ("gpt", {"dp": 2}, "zero-1"),
        ("bert", {"dp": 2, "loops": 2, "schedule": "breadth-first"}, "zero-2"),
        ("llama", {"dp": 2, "loops": 4, "schedule": "depth-first"}, "zero-2"),
        ("gpt", {"dp": 2, "loops": 2, "schedule": "breadth-first"}, "zero-3"),
        ("llama", {"pp": 2, "schedule": "zb-h1"}, "zero-0"),
        ("gpt", {"pp": 2, "loops": 2, "schedule": "zb-v"}, "zero-0"),
        ("gpt", {"pp": 2, "schedule": "chimera"}, "zero-0"),
    ],
)
def test_with_pipelines_and_replicas(
    worker_pool: WorkerPool, family: str, options: dict[str, Any], sharding: str
) -> None:
    config = divisible(family)
    plan = tensor_plan(config, **options).model_copy(update={"sharding": sharding})
    require_equal(worker_pool, config, plan)


def test_four_tensor_ranks(worker_pool: WorkerPool) -> None:
    config = divisible("llama", heads=4)
    require_equal(worker_pool, config, tensor_plan(config, tp=4))


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt", {}), ("bert", {"pp": 2, "schedule": "1f1b"}), ("llama", {"dp": 2, "schedule": "zb-h1"})],
)
def test_tied_embeddings(worker_pool: WorkerPool, family: str, options: dict[str, Any]) -> None:
    config = divisible(family, tied=True)
    require_equal(worker_pool, config, tensor_plan(config, **options))


@pytest.mark.parametrize(
    ("recompute", "schedule"), [("full", "gpipe"), ("full", "zb-h1"), ("selective", "1f1b")]
)
def test_recomputed_layers_exchange_again(worker_pool: WorkerPool, recompute: str, schedule: str) -> None:
    config = divisible("gpt")
    plan = tensor_plan(config, schedule=schedule)
    stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in plan.stages)
    require_equal(worker_pool, config, plan.model_copy(update={"stages": stages}))


@pytest.mark.parametrize(("dp", "sharding"), [(1, "zero-0"), (2, "zero-0"), (2, "zero-1")])
def test_the_norm_counts_every_element_once(worker_pool: WorkerPool, dp: int, sharding: str) -> None:
    config = divisible("gpt")
    plan = tensor_plan(config, dp=dp)
    plan = plan.model_copy(update={"sharding": sharding, "methods": CLIPS})
    require_equal(worker_pool, config, plan, clip_norm=0.2)


def test_a_loss_that_takes_no_shares_is_given_all_logits(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    require_equal(worker_pool, config, tensor_plan(config), divided_loss=False)


def evaluate(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> tuple[float, float]:
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=DividedLoss())
    program = compile_evaluation_part(plan, layer_graph(config), rank)
    evaluated = runtime.evaluate(program, [samples_of(config, plan, 0)])
    trained = runtime.step(0, samples_of(config, plan, 0)).loss
    runtime.close()
    return evaluated, trained


def test_an_evaluation_counts_the_loss_once(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    for evaluated, trained in worker_pool.run(evaluate, config, tensor_plan(config), ranks=2):
        assert evaluated == trained


class Whitening(torch.optim.SGD):
    """Might look at a parameter as a whole."""


def refuse_optimizer(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    def factory(stage: torch.nn.Module) -> torch.optim.Optimizer:
        return Whitening(stage.parameters(), 0.1)

    with pytest.raises(InputError) as caught:
        make_runtime(rank, config, plan, make_program(config, plan), optimizer_factory=factory)
    return str(caught.value)


def test_an_optimizer_of_whole_parameters_is_refused(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    for said in worker_pool.run(refuse_optimizer, config, tensor_plan(config), ranks=2):
        begin = (
            "optimizer: Whitening is not known to step every element by itself, as tensor parallelism needs"
        )
        assert said.startswith(begin)


def train_in_bf16(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> list[float]:
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=DividedLoss())
    losses = [runtime.step(step, samples_of(config, plan, 0)).loss for step in range(3)]
    runtime.close()
    return losses


@pytest.mark.parametrize("sequence", [8, 7], ids=["stream divided", "stream whole"])
def test_bf16_trains_and_repeats_to_the_bit(worker_pool: WorkerPool, sequence: int) -> None:
    config = divisible("gpt", sequence=sequence)
    plan = tensor_plan(config).model_copy(update={"precision": "bf16"})
    first, again = (worker_pool.run(train_in_bf16, config, plan, ranks=2) for _ in range(2))
    assert first == again
    assert first[0] == first[1]
    assert first[0][2] < first[0][0]


def give_whole_stages(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    stages = {0: build_stage(config, plan.stages[0].layers, SEED, torch.float64)}
    with pytest.raises(InputError) as caught:
        RankRuntime(
            plan,
            part_of(make_program(config, plan), rank),
            stages,
            whole_loss,
            descent,
            device="cpu",
            seed=SEED,
        )
    return str(caught.value)


def test_stages_must_be_the_shares_that_the_plan_gives(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    assert worker_pool.run(give_whole_stages, config, tensor_plan(config), ranks=2) == [
        f"stage 0: rank {rank} was given tensor share 0 of 1, the plan gives it {rank} of 2"
        for rank in range(2)
    ]


def leave_early(rank: int, ranks: int) -> str:
    """The second rank never comes to the sum."""
    if rank == 1:
        return ""
    group = TensorRanks(rank, ranks)
    group.connect(HostGroup(dist.group.WORLD))
    with pytest.raises(PeerLostError) as caught:
        group.add_up(torch.ones(3))
    return str(caught.value)


def test_a_rank_that_is_gone_is_named_as_such(worker_pool: WorkerPool) -> None:
    said, _ = worker_pool.run(leave_early, ranks=2)
    assert said.startswith("lost another tensor rank: ")


def kept_bytes(rank: int, ranks: int, config: ModelConfig, first: int, last: int) -> tuple[int, int]:
    """Bytes that layers leave from their forward to their backward pass, and what is predicted."""
    stage = build_stage(config, range(first, last), SEED, torch.float32, tensor_share=(rank, ranks))
    stage.tensor.connect(HostGroup(dist.group.WORLD))
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = torch.randn(stage.input_shape(3, config.sequence), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(inputs)
    assert output.shape == stage.output_shape(3, config.sequence)
    shape = Shape(3, config.sequence, ranks)
    return sum(found.values()), stage_kept_bytes(layer_graph(config), range(first, last), shape, "fp32")


@pytest.mark.parametrize("sequence", [32, 31], ids=["stream divided", "stream whole"])
def test_blocks_keep_what_is_predicted(worker_pool: WorkerPool, sequence: int) -> None:
    config = replace(divisible("gpt", sequence=sequence), hidden=64, feed_forward=128)
    for kept, predicted in worker_pool.run(kept_bytes, config, 1, 3, ranks=2):
        assert kept == pytest.approx(predicted, rel=0.02)


def test_the_values_of_shares_are_those_of_the_whole() -> None:
    for family in ("gpt", "llama", "bert", "vit"):
        config = divisible(family)
        whole = build_stage(config, range(4), 3, torch.float32)
        shares = [build_stage(config, range(4), 3, torch.float32, tensor_share=(i, 2)) for i in range(2)]
        for name, value in whole.named_parameters():
            parts = [share.get_parameter(name).detach() for share in shares]
            division = shares[0].divisions.get(name)
            if division is None:
                assert all(torch.equal(part, value) for part in parts), name
            else:
                assert parts[0].shape == parts[1].shape
                assert torch.equal(division.joined(parts, shares[0].tensor), value), name
        assert 0 < len(shares[0].divisions) < len(dict(whole.named_parameters()))


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        build_stage(tiny(), range(8), 0, torch.float32, tensor_share=(0, 3))
    assert str(caught.value) == "model tiny-gpt: tp 3 does not divide 2 heads; nearest tp: 2"
    own = resolve_model("own_models:images")
    with pytest.raises(InputError, match="tp 2: no layer of the model can be divided over tensor ranks"):
        build_stage(own, [0], 0, torch.float32, tensor_share=(0, 2))
