"""Sums inside nodes first: nodes follow from the cluster, and what has no nodes is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predict.cost.machines import MODEL, cluster
from predict.plans import plan_of

from weft.bundles import bundles, parts_of
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.moves.composition import Composition
from weft.moves.move import Context, Move

BUNDLE = bundles()["hierarchical"]
GRAPH = layer_graph(MODEL)
LAYOUT = Layout(pp=1, dp=8, loops=1, micro_batch_size=1, schedule="1f1b", sync="hierarchical")


def moved(nodes: int, devices: int, **changes: object) -> tuple[str | None, Plan]:
    where = cluster(nodes=nodes, devices=devices)
    plan = plan_of(GRAPH, where, pp=1, dp=8).model_copy(update=changes)
    (move,) = parts_of(Move, [BUNDLE])
    context = Context(plan=plan, graph=GRAPH, cluster=where)
    return move.applies(context), move.apply(context)


@pytest.mark.parametrize(("nodes", "devices", "inside"), [(2, 4, 4), (4, 2, 2), (1, 8, 8), (8, 1, 1)])
def test_neighbours_follow_from_the_cluster(nodes: int, devices: int, inside: int) -> None:
    problem, plan = moved(nodes, devices)
    assert plan.sync == Choice(name="hierarchical", options={"replicas_per_node": inside})
    flat = "no node has several of the replicas, but not all"
    assert problem == (None if inside in (2, 4) else flat)


def test_islands_and_rounded_sums_stay_as_they_are() -> None:
    assert moved(2, 4, sharding="zero-3", island=4)[0] == "islands have two levels already"
    rounded = moved(2, 4, reduce_precision="bf16")[0]
    assert rounded == "replicas send other numbers than whole gradients"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"sharding": "zero-2"}, None),
        ({"dp": 1}, "one replica sends nothing"),
        ({"sharding": "zero-1", "island": 2}, "islands have two levels already"),
    ],
)
def test_layouts_without_nodes_are_refused(changes: dict[str, object], problem: str | None) -> None:
    job = Job(graph=GRAPH, cluster=cluster(nodes=2, devices=4), global_batch=8, sequence=GRAPH.sequence)
    (composition,) = parts_of(Composition, [BUNDLE])
    reason = composition.refuse(job, replace(LAYOUT, **changes))
    assert reason == (problem and f"hierarchical: {problem}; nearest sync.method: dense")


def test_edited_plans_need_whole_nodes() -> None:
    (rule,) = parts_of(PlanRule, [BUNDLE])
    plan = moved(2, 4)[1]
    assert list(rule.refuse(plan, GRAPH)) == []
    odd = plan.model_copy(update={"sync": Choice(name="hierarchical", options={"replicas_per_node": 3})})
    assert [str(one) for one in rule.refuse(odd, GRAPH)] == [
        "plan: sync.replicas_per_node: 8 replicas cannot make whole nodes of 3 (nearest valid: 1)"
    ]
    unknown = plan.model_copy(update={"sync": Choice(name="hierarchical", options={"rank": 3})})
    (problem,) = rule.refuse(unknown, GRAPH)
    assert str(problem).startswith("plan: sync.options: rank: unknown key")
