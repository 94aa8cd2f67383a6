"""The best layout of each method over the batch per device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.describe.layout import PartialLayout
from weft.errors import InputError
from weft.planning.curve import (
    BREADTH_FIRST,
    DEPTH_FIRST,
    GPIPE,
    METHODS,
    NO_PIPELINE,
    ONE_FORWARD_ONE_BACKWARD,
    RIVALS,
    Curve,
    curve,
    default_cluster_sizes,
    default_critical_batch,
    default_samples_per_device,
)
from weft.planning.planners import get_planner
from weft.planning.problem import Problem, problem_of
from weft.planning.throughput import model_flops_utilisation
from weft.predict.trade_off import cheapest
from weft.progress import WorkDone

SHARES = (0.25, 2.0)


def problem(model: str = "gpt-1m", on: str = "16xv100-32gb", pins: PartialLayout | None = None) -> Problem:
    return problem_of(model=model, on=on, precision="fp16", pins=pins)


@pytest.fixture(scope="module")
def small() -> Curve:
    return curve(problem(), samples_per_device=SHARES)


def test_a_curve_tells_how_many_searches_are_done() -> None:
    told: list[WorkDone] = []
    curve(problem(), samples_per_device=SHARES, methods=METHODS[:2], report=told.append)
    assert [(one.done, one.total) for one in told] == [(done, 4) for done in range(5)]


def test_there_is_a_point_for_every_method_and_batch(small: Curve) -> None:
    assert small.methods == METHODS
    assert small.samples_per_device == SHARES
    assert len(small.points) == len(METHODS) * len(SHARES)


def test_every_layout_is_one_of_its_method(small: Curve) -> None:
    for point in small.points:
        assert point.candidate is not None
        layout, method = point.candidate.layout, point.method
        assert method.admits(layout)
        assert (layout.pp > 1) == method.pipelined
        assert layout.schedule == method.schedule
        assert layout.blocking == method.blocking
        assert method.sharding in (None, layout.sharding)
    loops = {method: small.point(method.name, 2.0) for method in (BREADTH_FIRST, DEPTH_FIRST)}
    assert all(point.candidate and point.candidate.layout.loops > 1 for point in loops.values())


def test_every_plan_runs_the_batch_of_its_point_in_the_time_its_utilisation_says(small: Curve) -> None:
    for point in small.points:
        assert point.candidate is not None
        assert point.candidate.plan is not None
        assert point.candidate.plan.global_batch == point.samples_per_device * 16
        job = replace(small.problem.job, global_batch=point.candidate.plan.global_batch)
        assert point.utilisation == model_flops_utilisation(job, job.cluster.ranks, point.step_s)
        assert 0 < point.utilisation < 1


def test_no_layout_of_the_schedule_that_the_planner_finds_is_better(small: Curve) -> None:
    for method in (ONE_FORWARD_ONE_BACKWARD, GPIPE):
        posed = replace(
            small.problem,
            job=replace(small.problem.job, global_batch=32),
            pins=PartialLayout(schedule=method.schedule, loops=1),
        )
        found = [
            item for item in get_planner("homogeneous").search(posed).fitting if method.admits(item.layout)
        ]
        steps = [item.prediction.step_s for item in found if item.prediction]
        assert small.point(method.name, 2.0).step_s == min(steps)


def test_a_rival_as_shipped_is_never_faster_than_the_rival(small: Curve) -> None:
    for rival, shipped in RIVALS.items():
        for share in SHARES:
            assert small.point(shipped.name, share).step_s >= small.point(rival.name, share).step_s


def test_the_trade_off_is_that_of_the_method_s_utilisation(small: Curve) -> None:
    utilisation = small.utilisation("1f1b")
    assert set(utilisation) == set(SHARES)
    assert small.trade_offs("1f1b", (16, 4096), 512) == tuple(
        cheapest(utilisation, devices, 512) for devices in (16, 4096)
    )


def test_pins_hold_for_every_method() -> None:
    answer = curve(problem(pins=PartialLayout(tp=2, micro_batch_size=1)), samples_per_device=(1.0,))
    fitting = [point.candidate.layout for point in answer.points if point.candidate is not None]
    assert fitting
    assert {(layout.tp, layout.micro_batch_size) for layout in fitting} == {(2, 1)}
    pipelines = curve(problem(pins=PartialLayout(pp=2)), samples_per_device=(1.0,))
    assert pipelines.point(NO_PIPELINE.name, 1.0).candidate is None
    assert pipelines.point(NO_PIPELINE.name, 1.0).reason == "no layout satisfies the given degrees"
    looped = curve(problem(pins=PartialLayout(loops=2)), samples_per_device=(1.0,))
    assert looped.point("gpipe", 1.0).candidate is None
    assert looped.point("breadth-first", 1.0).candidate is not None


def test_a_model_that_fits_nowhere_says_why() -> None:
    answer = curve(problem("gpt-52b", "4xv100-32gb"), samples_per_device=(1.0,), methods=(GPIPE,))
    (point,) = answer.points
    assert point.candidate is None
    assert "more than any device has" in point.reason
    assert answer.utilisation("gpipe") == {}


def test_defaults_follow_the_cluster_and_the_model() -> None:
    job = problem("gpt-52b", "64xv100-32gb").job
    assert default_samples_per_device(job) == (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
    assert default_cluster_sizes(job)[:3] == (64, 128, 256)
    assert 10_000 < default_critical_batch(job) < 16_000


def test_impossible_questions_are_refused_at_once() -> None:
    with pytest.raises(InputError) as refused:
        curve(problem(pins=PartialLayout(schedule="gpipe")), samples_per_device=(0.3, 1))
    assert [str(item) for item in refused.value.violations] == [
        "samples per device: 0.3 on 16 devices is 4.8 samples; a whole number is needed "
        "(nearest valid: 0.3125)",
        "schedule: 'gpipe' is pinned; the curve compares schedules",
    ]
