"""Bounds by messages and collectives are below what the simulator finds, and near it where links decide."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from weft.describe.layout import Layout
from weft.moves.layout import build_plan, refuse
from weft.planning.cluster_changes import changed_cluster
from weft.planning.compile import compile_folded
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.homogeneous import ExhaustivePlanner, HomogeneousPlanner
from weft.planning.planners.link_bounds import LinkBounds
from weft.planning.problem import Problem, problem_of
from weft.predict.predict import predict
from weft.program.schedules import SCHEDULES

layouts = st.builds(
    Layout,
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4]),
    loops=st.sampled_from([1, 2, 3]),
    micro_batch_size=st.sampled_from([1, 2]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    sharding=st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]),
    island=st.sampled_from([None, None, 2, 4]),
    recompute=st.sampled_from(["none", "full"]),
    blocking=st.sampled_from([(), (), ("reductions",)]),
)


@cache
def problem(on: str, change: str, batch: int) -> Problem:
    posed = problem_of(model="gpt-1m", on=on, global_batch=batch, sequence=128, launch="captured")
    return replace(posed, job=replace(posed.job, cluster=changed_cluster(posed.job.cluster, change)))


problems = st.builds(
    problem,
    st.sampled_from(["16xa100-40gb", "32xa100-40gb"]),
    st.sampled_from(["inter 1 Gbit/s", "inter 30 Gbit/s", "inter 2000 Gbit/s", "intra 1 GB/s"]),
    st.sampled_from([16, 48, 64]),
)


def simulated_s(posed: Problem, layout: Layout, bounds: Bounds) -> float:
    plan = build_plan(posed.job, layout, bounds.layer_seconds(layout))
    program = compile_folded(plan, posed.job.graph, posed.job.cluster)
    return predict(posed.cost_model, plan, program).prediction.step_s


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(problems, layouts)
def test_no_step_is_shorter_than_its_messages_and_collectives_allow(posed, layout):
    assume(refuse(posed.job, layout) is None)
    bounds = Bounds(posed)
    bound_s = LinkBounds(posed, bounds).step_s(layout)
    # Times are rounded to ticks.
    assert bound_s <= simulated_s(posed, layout, bounds) * (1 + 1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe", "hybrid"])
def test_messages_that_an_order_cannot_hide_count(schedule):
    posed = problem("16xa100-40gb", "inter 1 Gbit/s", 64)
    layout = Layout(pp=2, dp=8, loops=1, micro_batch_size=1, schedule=schedule)
    bounds = Bounds(posed)
    step_s = simulated_s(posed, layout, bounds)
    assert bounds.step_s(layout) < 0.5 * step_s < 0.9 * step_s < LinkBounds(posed, bounds).step_s(layout)


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize(("sharding", "island"), [("zero-0", None), ("zero-1", None), ("zero-2", 8)])
def test_collectives_of_replicas_count_once(sharding, island, loops):
    posed = problem("16xa100-40gb", "inter 1 Gbit/s", 16)
    layout = Layout(
        pp=1,
        dp=16,
        loops=loops,
        micro_batch_size=1,
        schedule="breadth-first",
        sharding=sharding,
        island=island,
    )
    bounds = Bounds(posed)
    step_s = simulated_s(posed, layout, bounds)
    assert bounds.step_s(layout) < 0.5 * step_s < 0.9 * step_s < LinkBounds(posed, bounds).step_s(layout)


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1"])
def test_messages_and_collectives_share_the_links_of_a_node(sharding):
    posed = problem("32xa100-40gb", "inter 1 Gbit/s", 64)
    layout = Layout(pp=2, dp=16, loops=1, micro_batch_size=1, schedule="chimera", sharding=sharding)
    bounds = Bounds(posed)
    step_s = simulated_s(posed, layout, bounds)
    assert 0.9 * step_s < LinkBounds(posed, bounds).step_s(layout)


@pytest.mark.parametrize("change", ["inter 1 Gbit/s", "inter 30 Gbit/s"])
def test_bounds_only_leave_simulations_out(change):
    posed = problem("16xa100-40gb", change, 16)
    # No layout has a variant that dominates it.
    posed = replace(posed, pins=posed.pins.replaced(sharding="zero-1", recompute="none", loss="whole"))
    every, few = ExhaustivePlanner().search(posed), HomogeneousPlanner().search(posed)
    assert [one.step_s for one in few.fitting[:8]] == [one.step_s for one in every.fitting[:8]]
    assert len(few.fitting) < len(every.fitting) / 2
