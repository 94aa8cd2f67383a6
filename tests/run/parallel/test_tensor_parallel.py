"""Stages that are divided over tensor ranks: what they count, keep and refuse.

That they train like one process: `test_equality_table.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from divided_stages import evaluate_and_train, losses_of_three_steps, refusal_of_whole_stages
from equality_table import Row
from pool import WorkerPool
from small_jobs import SEED, make_runtime
from small_plans import divisible, make_program, tiny
from tensor_jobs import DividedLoss

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.predict.cost.memory import stage_kept_bytes
from weft.run.launch.failures import PeerLostError
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.build import build_stage
from weft.run.transport.host_group import HostGroup

pytestmark = pytest.mark.processes


def test_an_evaluation_counts_the_loss_once(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    for evaluated, trained in worker_pool.run(
        evaluate_and_train, config, Row(config, tp=2).plan, DividedLoss, ranks=2
    ):
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
    for said in worker_pool.run(refuse_optimizer, config, Row(config, tp=2).plan, ranks=2):
        begin = (
            "optimizer: Whitening is not known to step every element by itself, as tensor parallelism needs"
        )
        assert said.startswith(begin)


@pytest.mark.parametrize("sequence", [8, 7], ids=["stream divided", "stream whole"])
def test_bf16_trains_and_repeats_to_the_bit(worker_pool: WorkerPool, sequence: int) -> None:
    config = divisible("gpt", sequence=sequence)
    plan = Row(config, tp=2, precision="bf16").plan
    first, again = (
        worker_pool.run(losses_of_three_steps, config, plan, DividedLoss, ranks=2) for _ in range(2)
    )
    assert first == again
    assert first[0] == first[1]
    assert first[0][2] < first[0][0]


def test_stages_must_be_the_shares_that_the_plan_gives(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    assert worker_pool.run(refusal_of_whole_stages, config, Row(config, tp=2).plan, ranks=2) == [
        f"stage 0: rank {rank} was given tensor share 0 of 1, the plan gives it {rank} of 2"
        for rank in range(2)
    ]


def leave_early(rank: int, ranks: int) -> str:
    """The second rank never comes to the sum."""
    # Before that, gloo would say that the ranks did not connect.
    dist.barrier()
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
            assert (division is None) == (name not in shares[0].shares)
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
