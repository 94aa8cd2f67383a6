"""Law: replicas with unequal shares of the batch, and stages of unequal layers, train like one process."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from pool import WorkerPool
from run.test_equality import require_equal
from run.test_sharded import require_like_replicated
from small_jobs import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.errors import InputError
from weft.program.verify import require_valid

pytestmark = pytest.mark.processes


def shared_as(plan: Plan, shares: tuple[int, ...]) -> Plan:
    """The plan with so many micro-batches of each replica of every stage."""
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    copy.model_copy(update={"micro_batches": share})
                    for copy, share in zip(stage.replicas, shares, strict=True)
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(
        update={"stages": stages, "global_batch": sum(shares) * plan.micro_batch_size, "prediction": None}
    )


def cut_as(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """The plan with so many layers in each stage."""
    borders = [0, *accumulate(counts)]
    stages = tuple(
        stage.model_copy(update={"layers": tuple(range(*pair))})
        for stage, pair in zip(plan.stages, pairwise(borders), strict=True)
    )
    return plan.model_copy(update={"stages": stages})


@pytest.mark.parametrize(
    ("schedule", "pp", "loops", "shares"),
    [("gpipe", 1, 1, (1, 4, 2)), ("1f1b", 2, 1, (5, 2)), ("zb-h1", 2, 1, (3, 2))],
)
def test_unequal_shares_of_the_batch(
    worker_pool: WorkerPool, schedule: str, pp: int, loops: int, shares: tuple[int, ...]
) -> None:
    config = tiny()
    plan = shared_as(make_plan(config, pp=pp, dp=len(shares), loops=loops, schedule=schedule), shares)
    require_valid(make_program(config, plan))
    require_equal(worker_pool, config, plan, bitwise=False)


@pytest.mark.parametrize(("schedule", "loops", "shares"), [("1f1b", 1, (2, 5)), ("breadth-first", 2, (4, 1))])
def test_unequal_shares_of_replicas_that_share_states(
    worker_pool: WorkerPool, schedule: str, loops: int, shares: tuple[int, ...]
) -> None:
    config = tiny()
    even = make_plan(config, pp=2, dp=2, loops=loops, schedule=schedule, precision="fp32")
    require_like_replicated(worker_pool, config, shared_as(even, shares))


@pytest.mark.parametrize(
    ("schedule", "loops", "counts", "shares"),
    [
        ("1f1b", 1, (1, 7), (3, 3)),
        ("breadth-first", 2, (4, 1, 1, 2), (2, 2)),
        ("gpipe", 1, (6, 2), (1, 3)),
    ],
)
def test_unequal_layers(
    worker_pool: WorkerPool, schedule: str, loops: int, counts: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    config = tiny("llama")
    plan = cut_as(shared_as(make_plan(config, pp=2, dp=2, loops=loops, schedule=schedule), shares), counts)
    require_valid(make_program(config, plan))
    require_equal(worker_pool, config, plan, bitwise=False)


def test_shares_that_would_come_to_other_collectives_are_refused() -> None:
    config = tiny()
    even = make_plan(config, pp=2, dp=2, loops=3, schedule="depth-first")
    plan = shared_as(even, (4, 2)).model_copy(update={"sharding": "zero-2"})
    with pytest.raises(InputError, match=r"zero-2 in this order .* \(4, 2 micro-batches\)"):
        make_program(config, plan)
