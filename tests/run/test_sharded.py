"""Law: replicas that share out what they step train like replicas that do not, to the bit.

Where a stage's gradient is reduced in several parts, its sum has another order; there the law is that of
every exact plan: float64 to nine digits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pool import WorkerPool
from small_jobs import SEED, batch_of, make_plan, make_program, make_runtime, parameters_of, tiny
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.planning.compile import compile_evaluation_part
from weft.program.buffers import SHARDED_BUFFERS
from weft.program.verify import require_valid
from weft.run.stages import build_stage
from weft.run.stepped import ELEMENTWISE
from weft.training.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

STEPS = 3
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def train(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> Outcome:
    runtime = make_runtime(
        rank, config, plan, make_program(config, plan), optimizer_factory=optimizer_factory(ADAMW)
    )
    losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(STEPS)]
    runtime.gather_weights()
    parameters = parameters_of(runtime)
    runtime.close()
    return losses, parameters


def sharded(plan: Plan, sharding: str) -> Plan:
    return plan.model_copy(update={"sharding": sharding})


def parts(config: ModelConfig, plan: Plan) -> int:
    """The most reductions of one stage's gradient in a step of one rank."""
    columns = make_program(config, plan).columns
    return 1 + int(columns.part[columns.kind == REDUCE].max())


def require_like_replicated(pool: WorkerPool, config: ModelConfig, plan: Plan) -> None:
    expected = pool.run(train, config, plan, ranks=plan.ranks)
    for shared in (sharded(plan, sharding) for sharding in ("zero-1", "zero-2", "zero-3")):
        assert parts(config, shared) == 1
        require_valid(make_program(config, shared))
        found = pool.run(train, config, shared, ranks=plan.ranks)
        for (expected_losses, expected_parameters), (losses, parameters) in zip(expected, found, strict=True):
            assert losses == expected_losses
            assert set(parameters) == set(expected_parameters)
            for name, value in parameters.items():
                assert torch.equal(value, expected_parameters[name]), name


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "loops", "micro_batches"),
    [
        ("gpipe", 1, 3, 1, 2),
        ("1f1b", 2, 2, 1, 4),
        ("breadth-first", 1, 4, 4, 2),
        ("depth-first", 2, 2, 2, 4),
        ("zb-v", 2, 2, 2, 4),
        ("chimera", 2, 1, 1, 4),
    ],
)
def test_sharded_replicas_train_to_the_same_bits(
    worker_pool: WorkerPool, schedule: str, pp: int, dp: int, loops: int, micro_batches: int
) -> None:
    config = tiny()
    plan = make_plan(
        config, pp=pp, dp=dp, loops=loops, schedule=schedule, micro_batches=micro_batches, precision="fp32"
    )
    require_like_replicated(worker_pool, config, plan)


@pytest.mark.parametrize(
    ("schedule", "pp", "loops", "micro_batches"), [("depth-first", 2, 3, 4), ("depth-first", 1, 4, 3)]
)
def test_gradients_reduced_in_parts_sum_to_the_same(
    worker_pool: WorkerPool, schedule: str, pp: int, loops: int, micro_batches: int
) -> None:
    config = tiny()
    plan = make_plan(config, pp=pp, dp=2, loops=loops, schedule=schedule, micro_batches=micro_batches)
    expected = worker_pool.run(train, config, plan, ranks=plan.ranks)
    for shared in (sharded(plan, "zero-2"), sharded(plan, "zero-3")):
        assert parts(config, shared) > 1
        require_valid(make_program(config, shared))
        found = worker_pool.run(train, config, shared, ranks=plan.ranks)
        for (expected_losses, expected_parameters), (losses, parameters) in zip(expected, found, strict=True):
            assert losses == pytest.approx(expected_losses, rel=1e-9)
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected_parameters[name], rtol=1e-9, atol=1e-12)


def test_shares_without_any_parameter_that_decays(worker_pool: WorkerPool) -> None:
    """They leave a group of the optimizer empty: the table of the first layer is half of the only stage."""
    config = replace(tiny("llama", layers=1), vocabulary=200)
    plan = make_plan(config, dp=4, micro_batches=1, precision="fp32")
    require_like_replicated(worker_pool, config, plan)


def most_gradients(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> tuple[int, int, int]:
    """Most stages with a gradient at any time of two steps, and the bytes of the room for them and apart."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    rooms = {bucket.flat.untyped_storage().data_ptr(): bucket.flat for bucket in runtime.buckets.values()}
    counts: list[int] = []

    def look(stage: torch.nn.Module) -> None:
        # Another thread takes gradients out, so that no other stage's are looked at.
        counts.append(sum(bucket.holds for bucket in runtime.buckets.values()))
        mine = {one.grad.untyped_storage().data_ptr() for one in stage.parameters() if one.grad is not None}
        # All gradients lie in the room there is.
        assert mine <= set(rooms)

    for stage in runtime.stages.values():
        next(stage.parameters()).register_hook(lambda _, stage=stage: look(stage))
    for step in range(2):
        runtime.step(step, batch_of(config, plan, step))
    room = sum(flat.untyped_storage().nbytes() for flat in rooms.values())
    apart = {
        piece.stepped.grad.untyped_storage().data_ptr(): piece.stepped.grad.untyped_storage().nbytes()
        for stepped in runtime.stepped.values()
        for piece in stepped.pieces
        if piece.stepped.grad is not None
    }
    runtime.close()
    return max(counts), room, sum(apart.values())


@pytest.mark.parametrize(
    ("schedule", "loops"), [("breadth-first", 4), ("depth-first", 4), ("depth-first", 3)]
)
def test_no_rank_holds_the_gradients_of_all_stages(
    worker_pool: WorkerPool, schedule: str, loops: int
) -> None:
    config = tiny()
    plan = sharded(make_plan(config, dp=2, loops=loops, schedule=schedule), "zero-2")
    modules = [build_stage(config, stage.layers, SEED, torch.float64) for stage in plan.stages]
    # Two ranks share an even number of elements, of eight bytes each.
    sizes = [16 * -(-sum(one.numel() for one in module.parameters()) // 2) for module in modules]
    for stages, room, apart in worker_pool.run(most_gradients, config, plan, ranks=2):
        assert 1 <= stages <= SHARDED_BUFFERS < loops
        # Two buffers, each as large as the largest stage that uses it, and half of every stage.
        assert room == max(sizes[0::2]) + max(sizes[1::2]) < sum(sizes)
        assert apart == sum(sizes) // 2


def evaluate(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> list[float]:
    """Held-out losses before, between and after two steps; what is evaluated has the newest weights."""
    forward_only = compile_evaluation_part(plan, layer_graph(config), rank)
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    held_out = [batch_of(config, plan, 100)]
    losses = [runtime.evaluate(forward_only, held_out)]
    for step in range(2):
        losses.append(runtime.step(step, batch_of(config, plan, step)).loss)
        losses.append(runtime.evaluate(forward_only, held_out))
    runtime.close()
    return losses


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3"])
def test_evaluation_gathers_the_newest_weights(worker_pool: WorkerPool, sharding: str) -> None:
    config = tiny()
    plan = make_plan(config, pp=2, dp=2, loops=2, schedule="breadth-first", precision="fp32")
    expected, found = (
        worker_pool.run(evaluate, config, one, ranks=4) for one in (plan, sharded(plan, sharding))
    )
    assert found == expected
    assert len(set(expected[0])) == 5


class Whitening(torch.optim.SGD):
    """Might look at a parameter as a whole."""


def refuse(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    with pytest.raises(InputError) as caught:
        make_runtime(
            rank,
            config,
            plan,
            make_program(config, plan),
            optimizer_factory=lambda stage: Whitening(stage.parameters(), 0.1),
        )
    return str(caught.value)


def test_an_optimizer_that_cannot_be_shared_out_is_refused(worker_pool: WorkerPool) -> None:
    plan = sharded(make_plan(tiny(), dp=2), "zero-1")
    texts = worker_pool.run(refuse, tiny(), plan, ranks=2)
    known = ", ".join(optimizer.__name__ for optimizer in ELEMENTWISE)
    assert (
        texts
        == [
            "optimizer: Whitening is not known to step every element by itself, as sharding 'zero-1' needs; "
            f"known are {known} (nearest valid: AdamW)"
        ]
        * 2
    )


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("cut", [1, 7, 16, 333])
def test_elementwise_optimizers_step_pieces_like_the_whole(
    optimizer: type[torch.optim.Optimizer], cut: int
) -> None:
    def stepped(borders: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(cut)
        flat = torch.randn(500, generator=generator)
        pieces = [nn.Parameter(flat[start:end]) for start, end in pairwise(borders)]
        made = optimizer(pieces, lr=0.01)
        for _ in range(3):
            gradient = torch.randn(500, generator=generator)
            for piece, start in zip(pieces, borders, strict=False):
                piece.grad = gradient[start : start + len(piece)]
            made.step()
        return flat

    assert torch.equal(stepped([0, cut, 500]), stepped([0, 500]))
