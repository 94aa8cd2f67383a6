"""Replicas that share out what they step: gradients that they hold, evaluations, what is refused.

That they train like one process: `tests/methods/rows/sharding.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from equality_table import Row
from pool import WorkerPool
from small_jobs import SEED, batch_of, make_runtime
from small_plans import make_program, tiny, without_padding
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.compile import compile_evaluation_part
from weft.program.buffers import SHARDED_BUFFERS
from weft.run.stage.build import build_stage
from weft.run.state.stepped import ELEMENTWISE

pytestmark = pytest.mark.processes


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
    config = without_padding()
    plan = Row(config, schedule, dp=2, loops=loops, sharding="zero-2").plan
    modules = [build_stage(config, stage.layers, SEED, torch.float64) for stage in plan.stages]
    sizes = [8 * sum(one.numel() for one in module.parameters()) for module in modules]
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
    row = Row(tiny(), "breadth-first", pp=2, dp=2, loops=2, precision="fp32")
    plans = (row.plan, replace(row, sharding=sharding).plan)
    expected, found = (worker_pool.run(evaluate, row.model, plan, ranks=4) for plan in plans)
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
    plan = Row(tiny(), dp=2, sharding="zero-1").plan
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


def test_shares_that_would_come_to_other_collectives_are_refused() -> None:
    row = Row(tiny(), "depth-first", pp=2, dp=2, loops=3, shares=(4, 2), sharding="zero-2")
    with pytest.raises(InputError, match=r"in this order of micro-batches.* \(4, 2 micro-batches\)"):
        make_program(row.model, row.plan)


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
