"""Islands are proposed where nodes hold some of a stage's replicas, and win where they should."""

from dataclasses import replace
from functools import cache

import pytest

from weft.describe.cluster import Link
from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan_file import check_plan
from weft.moves.layout import build_plan, refuse
from weft.planning.compile import compile_folded, compile_plan
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.planners.space import layouts
from weft.planning.problem import problem_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.verify import verify

ETHERNET = Link(12.5e9, 2e-5)


@cache
def problem(on="32xa100-80gb", batch=32, **pins):
    """gpt2 on nodes of eight devices with slow links between them."""
    posed = problem_of(model="gpt2", on=on, global_batch=batch, precision="bf16", pins=PartialLayout(**pins))
    cluster = replace(posed.job.cluster, links=dict.fromkeys(posed.job.cluster.links, ETHERNET))
    return replace(posed, job=replace(posed.job, cluster=cluster))


def islands(posed):
    return {layout.island for layout in layouts(posed)}


def test_islands_are_those_of_nodes():
    space = [layout for layout in layouts(problem()) if layout.island is not None]
    assert {layout.sharding for layout in space} == {"zero-3"}
    assert all(layout.island * layout.tp <= 8 for layout in space)
    widths = {(one.dp, one.tp, one.island) for one in space if one.schedule == "1f1b"}
    assert widths == {(32, 1, 8), (16, 1, 8), (16, 2, 4), (8, 2, 4), (8, 4, 2), (4, 4, 2)}


def test_one_node_has_no_islands_nor_has_a_search_for_memory():
    assert islands(problem("8xa100-80gb")) == {None}
    assert islands(replace(problem(), minimise="memory")) == {None}
    (group,) = problem().job.cluster.groups
    slow = replace(group, device=replace(group.device, synchronous=True))
    cluster = replace(problem().job.cluster, groups=(slow,))
    assert islands(replace(problem(), job=replace(problem().job, cluster=cluster))) == {None}


def test_a_pinned_island_is_kept_and_shares_something_out():
    space = list(layouts(problem(island=4)))
    assert {layout.island for layout in space} == {4}
    assert {layout.sharding for layout in space} == {"zero-1", "zero-2", "zero-3"}
    assert {layout.island for layout in layouts(problem(island=4, sharding="zero-3"))} == {4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sharding": "zero-0"}, "zero-0 shares nothing; nearest sharding: zero-1"),
        ({"island": 5}, "32 replicas cannot make whole islands of 5; nearest island: 4"),
        ({"island": 1}, "an island of 1 replica has nobody to share with; nearest island: 2"),
        ({"island": 64}, "32 replicas cannot make whole islands of 64; nearest island: 32"),
    ],
)
def test_a_layout_that_has_no_whole_islands_says_why(changes, expected):
    layout = Layout(
        pp=1,
        dp=32,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        **{"sharding": "zero-3", "island": 8, **changes},
    )
    assert (refuse(problem().job, layout) or "").endswith(expected)


def step_s(layout, posed):
    """Seconds of a step, the same for one replica in place of all; plan and program are proved."""
    job, bounds = posed.job, Bounds(posed)
    plan = build_plan(job, layout, bounds.layer_seconds(layout))
    assert check_plan(plan, job.graph, job.cluster) == []
    program = compile_plan(plan, job.graph)
    assert verify(program) == []
    folded = compile_folded(plan, job.graph, job.cluster)
    whole, kept = (
        predict(CostModel(graph=job.graph, cluster=job.cluster), plan, one).prediction
        for one in (program, folded)
    )
    if layout.island:
        assert kept.peak_bytes == whole.peak_bytes
        assert kept.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert kept.step_s >= bounds.step_s(layout)
    return kept.step_s


def test_islands_on_nodes_win_where_stages_are_gathered_often():
    """Depth-first with four stages to a device gathers and reduces each of them several times."""
    posed = problem(batch=128)
    often = Layout(
        pp=2,
        dp=16,
        loops=4,
        micro_batch_size=1,
        schedule="depth-first",
        sharding="zero-3",
    )
    assert step_s(replace(often, island=8), posed) < 0.75 * step_s(often, posed)


def test_islands_on_nodes_lose_where_stages_are_gathered_once():
    """An all-reduce of gradients in fp32 crosses the slow links in place of a gather in 16 bits."""
    once = Layout(
        pp=1,
        dp=32,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        sharding="zero-3",
    )
    assert step_s(replace(once, island=8), problem()) > 1.1 * step_s(once, problem())


def test_the_planner_finds_islands_where_they_win():
    posed = problem(batch=64, sharding="zero-3", schedule="depth-first", loops=4, pp=2, tp=1)
    best = HomogeneousPlanner().search(posed).fitting[0]
    assert best.layout.island == 8
    assert "zero-3 in islands of 8" in str(best.layout)
