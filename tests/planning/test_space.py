"""The space is open on devices that work apart from their host, and limited to what runs on CPUs."""

from dataclasses import replace

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import PartialLayout
from weft.describe.plan import RECOMPUTES
from weft.planning.planners.space import layouts
from weft.planning.problem import problem_of
from weft.program.schedules import SCHEDULES, splits_backward


def problem(on="8xa100-80gb", *, synchronous=False, batch=8, **pins):
    posed = problem_of(
        model="gpt-1m", on=on, global_batch=batch, precision="fp32", pins=PartialLayout(**pins)
    )
    if not synchronous:
        return posed
    (group,) = posed.job.cluster.groups
    group = replace(group, device=replace(group.device, synchronous=True))
    return replace(posed, job=replace(posed.job, cluster=replace(posed.job.cluster, groups=(group,))))


def test_layouts_use_every_device_and_are_looked_at_once():
    space = list(layouts(problem()))
    assert {layout.ranks for layout in space} == {8}
    assert len({str(layout) for layout in space}) == len(space)


def test_an_open_space_has_every_choice():
    space = list(layouts(problem()))
    assert {layout.tp for layout in space} == {1, 2, 4, 8}
    assert {layout.sharding for layout in space} == {"zero-0", "zero-1", "zero-2", "zero-3"}
    assert {layout.recompute for layout in space} == set(RECOMPUTES)
    # The model is a chain, where orders for graphs are twins of others. Layouts place no stages.
    assert {layout.schedule for layout in space} == set(SCHEDULES) - {
        "graph-1f1b",
        "graph-zb-h1",
        "placed",
        "placed-zb",
    }


def test_replicas_without_a_pipeline_may_turn_from_stage_to_stage():
    alone = list(layouts(problem(pp=1)))
    assert {(one.schedule, one.loops) for one in alone if one.dp > 1} == {
        ("1f1b", 1),
        *((name, loops) for name in ("depth-first", "breadth-first") for loops in (2, 4)),
    }
    assert {one.loops for one in alone if one.dp == 1} == {1}
    assert {one.loops for one in layouts(problem(synchronous=True, pp=1))} == {1}
    pinned = list(layouts(problem(pp=1, loops=3)))
    assert {(one.schedule, one.loops) for one in pinned} == {
        (name, 3) for name in ("1f1b", "depth-first", "breadth-first")
    }


def test_a_cluster_of_cpus_is_offered_what_the_runtime_runs():
    space = list(layouts(problem(synchronous=True)))
    choices = {(layout.tp, layout.sharding, layout.recompute) for layout in space}
    assert choices == {(1, "zero-0", "none")}
    assert not any(splits_backward(layout.schedule, layout.pp) for layout in space)
    assert {layout.pp for layout in space} == {1, 2, 4, 8}


@pytest.mark.parametrize("synchronous", [False, True])
def test_pins_hold_on_every_cluster(synchronous):
    pins = {"tp": 2, "sharding": "zero-2", "recompute": "full", "schedule": "zb-h1"}
    space = list(layouts(problem(synchronous=synchronous, **pins)))
    assert space
    for layout in space:
        assert {name: getattr(layout, name) for name in pins} == pins


def test_context_ranks_are_considered_when_pinned():
    assert {layout.cp for layout in layouts(problem())} == {1}
    space = list(layouts(problem(cp=2, tp=1)))
    assert {(layout.cp, layout.ranks) for layout in space} == {(2, 8)}
    beside = {(layout.tp, layout.ranks) for layout in layouts(problem(cp=2))}
    assert beside == {(1, 8), (2, 8), (4, 8)}


def test_one_replica_has_nobody_to_share_states_with():
    for layout in layouts(problem(dp=1)):
        assert layout.sharding == "zero-0" or layout.schedule == "chimera"


@pytest.mark.parametrize(
    ("on", "degrees"), [("16xa100-80gb", {1, 2, 4, 8}), ("6xa100-80gb", {1, 2}), ("3xa100-80gb", {1})]
)
def test_tensor_ranks_stay_inside_a_node(on, degrees):
    cluster = parse_cluster(on)
    space = list(layouts(problem(on, batch=24)))
    assert {layout.tp for layout in space} == degrees
    assert all(group.devices % max(degrees) == 0 for group in cluster.groups)
