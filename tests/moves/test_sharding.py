"""Sharding moves rise from zero-1 to zero-3, and are refused where nobody is there to share with."""

import pytest
from moves.contexts import context

from weft.moves.move import Context
from weft.moves.registry import get_move

RISING = ("shard optimizer states", "shard gradients", "shard weights")


def test_each_move_shares_out_more_than_the_one_before():
    before = context()
    for level, name in enumerate(RISING, start=1):
        move = get_move(name)
        assert move.applies(before) is None
        plan = move.apply(before)
        assert plan.sharding == f"zero-{level}"
        assert plan.stages == before.plan.stages
        before = Context(plan=plan, graph=before.graph, cluster=before.cluster)
    assert get_move(RISING[0]).applies(before) == "the plan already has zero-3"


@pytest.mark.parametrize("name", RISING)
def test_one_replica_has_nobody_to_share_with(name):
    assert "one replica" in (get_move(name).applies(context(data_parallel=1)) or "")


def test_gradients_that_are_reduced_at_the_end_are_not_shared_out():
    before = context()
    blocked = before.plan.model_copy(update={"blocking": ("reductions",)})
    reasons = [
        get_move(name).applies(Context(plan=blocked, graph=before.graph, cluster=before.cluster))
        for name in RISING
    ]
    assert reasons[0] is None
    assert all("step's end" in (reason or "") for reason in reasons[1:])
