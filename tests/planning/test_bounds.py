"""Bounds are below what the simulator finds, whatever the degrees, the order and the shards."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES, Choice
from weft.describe.prediction import Prediction
from weft.moves.layout import build_plan, refuse
from weft.planning.compile import compile_folded, compile_plan
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import problem_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.measurements import Measurements
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, LayerTiming
from weft.program.fold import fold_lanes
from weft.program.schedules import SCHEDULES

PROBLEM = problem_of(model="gpt-1m", on="16xa100-40gb", global_batch=16)
BOUNDS = Bounds(PROBLEM)
SHARDINGS = ("zero-0", "zero-1", "zero-2", "zero-3")

layouts = st.builds(
    Layout,
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    loops=st.sampled_from([1, 2]),
    micro_batch_size=st.sampled_from([1, 2]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    sharding=st.sampled_from(SHARDINGS),
    island=st.sampled_from([None, 2]),
    recompute=st.sampled_from(["none", "full"]),
    blocking=st.sampled_from([(), ("reductions",)]),
)
# Without a pipeline nothing is sent.
alone = st.builds(
    Layout,
    pp=st.just(1),
    dp=st.sampled_from([2, 4]),
    tp=st.sampled_from([1, 2]),
    loops=st.just(1),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["1f1b", "gpipe", "breadth-first"]),
    sharding=st.sampled_from(SHARDINGS),
    island=st.sampled_from([None, 2]),
    recompute=st.sampled_from(["none", "full"]),
)


@st.composite
def mixed(draw: st.DrawFn) -> Layout:
    """Layouts whose stages recompute unlike each other."""
    layout = draw(layouts)
    words = st.sampled_from(RECOMPUTES)
    return layout.recomputing(draw(st.lists(words, min_size=layout.stages, max_size=layout.stages)))


@st.composite
def offloading(draw: st.DrawFn) -> Layout:
    """Layouts that keep states in host memory, and activations where the order allows it."""
    layout = draw(layouts)
    every = Choice(name="offload", options={"states": True, "activations": draw(st.booleans())})
    moved = replace(layout, methods=(every,))
    if refuse(PROBLEM.job, moved) is None:
        return moved
    return replace(layout, methods=(Choice(name="offload", options={"states": True}),))


def simulated(layout: Layout) -> Prediction:
    job = PROBLEM.job
    plan = build_plan(job, layout, BOUNDS.layer_seconds(layout))
    program = fold_lanes(compile_plan(plan, job.graph, only_replica=0))
    return predict(CostModel(graph=job.graph, cluster=job.cluster), plan, program).prediction


@given(layouts | mixed() | offloading())
def test_no_step_is_shorter_and_no_peak_lower_than_its_bound(layout):
    assume(refuse(PROBLEM.job, layout) is None)
    prediction = simulated(layout)
    assert prediction.step_s >= BOUNDS.step_s(layout) * (1 - 1e-6)
    holding = BOUNDS.holding(layout)
    assert BOUNDS.resident_bytes(layout) <= holding.total <= max(prediction.peak_bytes)


@settings(max_examples=15)
@given(alone)
def test_without_messages_the_memory_bound_is_the_peak(layout):
    assume(refuse(PROBLEM.job, layout) is None)
    prediction = simulated(layout)
    # The bound sums whole bytes stage by stage.
    assert BOUNDS.holding(layout).total == pytest.approx(max(prediction.peak_bytes), rel=1e-4)


def test_recomputing_and_tensor_ranks_raise_the_time_bound_by_what_they_add():
    base = {"pp": 2, "dp": 2, "loops": 1, "micro_batch_size": 1}
    plain = Layout(**base, schedule="1f1b")
    again = Layout(**base, schedule="1f1b", recompute="full")
    assert 1.2 < BOUNDS.step_s(again) / BOUNDS.step_s(plain) < 1.5
    halved = Layout(**base, schedule="1f1b", tp=2)
    assert BOUNDS.step_s(halved) > BOUNDS.step_s(plain) / 2


@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])
@given(mixed())
def test_bounds_of_unlike_stages_lie_between_those_of_stages_that_are_alike(layout):
    layout = replace(layout, blocking=(), island=None)
    assume(refuse(PROBLEM.job, layout) is None)
    none, full = (layout.recomputing(word) for word in ("none", "full"))
    assert BOUNDS.step_s(none) <= BOUNDS.step_s(layout) <= BOUNDS.step_s(full) * (1 + 1e-12)
    resident, activations = BOUNDS.holdings(layout)
    assert (resident + activations).max() == BOUNDS.holding(layout).total
    # Nothing needs less room than what recomputes nothing, nothing leaves less than what recomputes all.
    assert (resident >= BOUNDS.holdings(none)[0]).all()
    assert (activations >= BOUNDS.holdings(full)[1]).all()


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(layouts | mixed() | offloading(), st.data())
def test_bounds_hold_for_stages_and_shares_of_any_size(layout, data):
    layout = replace(layout, blocking=(), sharding="zero-0", island=None)
    count, stages = len(PROBLEM.job.graph.layers), layout.stages
    assume(stages <= count and PROBLEM.job.global_batch >= layout.dp * layout.micro_batch_size)
    borders = sorted(data.draw(st.permutations(range(1, count)))[: stages - 1])
    rest = PROBLEM.job.global_batch // layout.micro_batch_size - layout.dp
    first = data.draw(st.integers(0, rest)) if layout.dp > 1 else rest
    shares = [1 + first, *[1] * (layout.dp - 1)]
    shares[-1] += rest - first
    layout = replace(
        layout,
        layers_per_stage=tuple(end - start for start, end in pairwise([0, *borders, count])),
        micro_batches_per_replica=tuple(shares),
    )
    assume(refuse(PROBLEM.job, layout) is None)
    job = PROBLEM.job
    plan = build_plan(job, layout, BOUNDS.layer_seconds(layout))
    program = compile_folded(plan, job.graph, job.cluster)
    prediction = predict(CostModel(graph=job.graph, cluster=job.cluster), plan, program).prediction
    assert prediction.step_s >= BOUNDS.step_s(layout) * (1 - 1e-6)
    assert BOUNDS.resident_bytes(layout) <= BOUNDS.holding(layout).total <= max(prediction.peak_bytes)


def test_what_tensor_ranks_exchange_is_counted_once_where_a_profile_contains_it():
    (group,) = PROBLEM.job.cluster.groups
    timings = tuple(
        LayerTiming(
            device=group.device.name,
            layer=kind,
            tp=2,
            micro_batch_size=1,
            forward_s=1e-6,
            backward_s=2e-6,
            update_s=0.0,
            activation_bytes=1000,
        )
        for kind in ("embedding", "block", "head")
    )
    profile = LayerProfile(model_fingerprint="", sequence=0, precision="", timings=timings, spread=0.0)
    problem = replace(PROBLEM, measurements=Measurements(profile=profile))
    job, bounds = problem.job, Bounds(problem)
    layout = Layout(
        pp=1,
        dp=1,
        tp=2,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
    )
    plan = build_plan(job, layout, bounds.layer_seconds(layout))
    program = compile_folded(plan, job.graph, job.cluster)
    step_s = predict(
        CostModel(graph=job.graph, cluster=job.cluster, profile=profile), plan, program
    ).prediction.step_s
    assert step_s == pytest.approx(16 * 6 * 3e-6)
    assert bounds.step_s(layout) == pytest.approx(step_s)
