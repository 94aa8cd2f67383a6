"""Sharding moves rise from zero-1 to zero-3, and are refused where nobody is there to share with."""

from dataclasses import replace

import pytest
from moves.contexts import context

from weft.describe.plan_file import check_plan
from weft.moves.move import Context
from weft.moves.registry import all_moves

RISING = ("shard optimizer states", "shard gradients", "shard weights")


def test_each_move_shares_out_more_than_the_one_before():
    before = context()
    for level, name in enumerate(RISING, start=1):
        move = all_moves()[name]
        assert move.applies(before) is None
        plan = move.apply(before)
        assert plan.sharding == f"zero-{level}"
        assert plan.stages == before.plan.stages
        before = Context(plan=plan, graph=before.graph, cluster=before.cluster)
    assert all_moves()[RISING[0]].applies(before) == "the plan already shares them out"


@pytest.mark.parametrize("name", RISING)
def test_one_replica_has_nobody_to_share_with(name):
    assert "dp is 1" in (all_moves()[name].applies(context(dp=1)) or "")


def on_one_node(**changes):
    """Eight replicas of one stage, all in one node."""
    before = context(pp=1, dp=8, micro_batch_size=1)
    return replace(before, plan=before.plan.model_copy(update=changes))


def on_two_nodes(**changes):
    """Eight replicas of one stage, each node of four devices has half of them."""
    before = context(pp=1, dp=8, micro_batch_size=1)
    node = replace(before.cluster.groups[0], count=2, devices=4)
    cluster = replace(before.cluster, groups=(node,), links={(node.name, node.name): node.link})
    plan = before.plan.model_copy(update={"cluster_fingerprint": cluster.fingerprint, **changes})
    return Context(plan=plan, graph=before.graph, cluster=cluster)


def test_replicas_of_a_node_become_an_island():
    move = all_moves()["shard inside nodes"]
    before = on_two_nodes(sharding="zero-3")
    assert move.applies(before) is None
    plan = move.apply(before)
    assert (plan.sharding, plan.island) == ("zero-3", 4)
    assert check_plan(plan, before.graph, before.cluster) == []


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (on_two_nodes(), "replicas share nothing out"),
        (on_two_nodes(sharding="zero-1", island=2), "or have islands"),
        (on_one_node(sharding="zero-1"), "no node holds several of them but not all"),
    ],
)
def test_an_island_needs_states_to_share_and_a_node(before, expected):
    assert expected in (all_moves()["shard inside nodes"].applies(before) or "")
