"""Gradients that are reduced in a precision of their own: by the device's backend, tied, and overflowing.

That host transports train like one process that rounds alike, bit for bit: `methods/rows/sharding.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from asked_methods import CLIPS
from equality_table import Row, differences, together, train
from methods.rows.sharding import LEVELS
from one_process import Outcome
from pool import WorkerPool
from small_jobs import batch_of, loss_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan

pytestmark = pytest.mark.processes

# Rounding to bf16 moves a number by at most 2^-9 of it. Sums of such numbers are smaller than the numbers.
BF16 = 2.0**-7
STEPS = 3
BROKEN_STEP = 1

REDUCED = (
    *(Row(tiny(), dp=3, micro_batches=2, precision="fp32", sharding=level) for level in LEVELS),
    Row(tiny(), "breadth-first", dp=4, loops=3, micro_batches=2, sharding="zero-2", island=2),
    # The gradients of both copies are summed over stages and replicas at once.
    Row(tiny(tied=True), "1f1b", pp=2, dp=2),
    Row(tiny(tied=True), "zb-h1", pp=4),
)


def lost(pool: WorkerPool, plan: Plan, row: Row, usual: Outcome, found: Outcome) -> float:
    """The largest difference of the two outcomes in any tensor, relative to what training changed of it."""
    _, begun = together(pool.run(train, replace(row, steps=0), plan, ranks=plan.ranks))
    return max(
        float((found[1][name] - expected).norm() / (expected - begun[name]).norm())
        for name, expected in usual[1].items()
    )


# On the host, rows of the equality table say more: those of `make test` round alike to the bit.
@pytest.mark.parametrize("transport", [pytest.param("host", marks=pytest.mark.tables), "device"])
@pytest.mark.parametrize("row", REDUCED, ids=str)
def test_it_trains_almost_as_without_and_again_to_the_bit(
    worker_pool: WorkerPool, row: Row, transport: str
) -> None:
    plain = replace(row, transport=transport)
    rounded = replace(plain, reduce_precision="bf16")
    usual, found, again = (
        together(worker_pool.run(train, one, one.plan, ranks=one.plan.ranks))
        for one in (plain, rounded, rounded)
    )
    assert set(differences(found, again).values()) == {0.0}
    # The casts are there: gradients have lost bits, and not many.
    assert 0.0 < lost(worker_pool, plain.plan, plain, usual, found) < BF16


@pytest.mark.parametrize("sharding", LEVELS)
def test_a_wire_as_wide_as_the_gradients_changes_no_bit(worker_pool: WorkerPool, sharding: str) -> None:
    for transport in ("host", "device"):
        plain = Row(tiny(), dp=2, precision="bf16", sharding=sharding, transport=transport)
        usual, found = (
            together(worker_pool.run(train, one, one.plan, ranks=2))
            for one in (plain, replace(plain, reduce_precision="fp32"))
        )
        assert set(differences(found, usual).values()) == {0.0}


def left_out(rank: int, ranks: int, config: ModelConfig, plan: Plan, transport: str) -> list[bool]:
    """Which steps are left out if one rank's gradient in one step is finite in fp32 and not in fp16."""
    micro_batches, calls = plan.stages[-1].replicas[0].micro_batches, 0

    def large(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        step, calls = calls // micro_batches, calls + 1
        return loss_of(logits, targets) * (1e8 if step == BROKEN_STEP and rank == ranks - 1 else 1.0)

    program = make_program(config, plan)
    runtime = make_runtime(
        rank, config, plan, program, loss_fn=large, clip_norm=1.0, skip_non_finite=True, transport=transport
    )
    found = [runtime.step(step, batch_of(config, plan, step)).left_out for step in range(STEPS)]
    runtime.close()
    return found


@pytest.mark.parametrize("transport", ["host", "device"])
@pytest.mark.parametrize("sharding", LEVELS)
def test_all_ranks_leave_out_a_step_whose_gradient_overflows_on_the_way(
    worker_pool: WorkerPool, sharding: str, transport: str
) -> None:
    # A gradient in fp32, so that nothing overflows before.
    plan = make_plan(tiny(), dp=2, precision="fp32").model_copy(
        update={"sharding": sharding, "methods": CLIPS}
    )
    narrow = plan.model_copy(update={"reduce_precision": "fp16"})
    for one, expected in ((plan, []), (narrow, [BROKEN_STEP])):
        for found in worker_pool.run(left_out, tiny(), one, transport, ranks=2):
            assert [step for step, gone in enumerate(found) if gone] == expected


def test_losses_scaled_for_fp16_are_unscaled_behind_the_reduction(worker_pool: WorkerPool) -> None:
    row = Row(tiny(), dp=2, precision="fp16", sharding="zero-1", steps=1)
    plan = row.plan.model_copy(update={"methods": CLIPS})
    usual, found = (
        together(worker_pool.run(train, row, one, ranks=2))
        for one in (plan, plan.model_copy(update={"reduce_precision": "fp16"}))
    )
    assert 0.0 < lost(worker_pool, plan, row, usual, found) < BF16
