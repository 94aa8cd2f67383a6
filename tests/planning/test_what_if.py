"""Forecasts: each is the search on that cluster, and more never makes a step longer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.run_file import run_of_keywords
from weft.errors import InputError
from weft.planning.goals import price_per_hour
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Verdict
from weft.planning.problem import problem_of_run
from weft.planning.what_if import TOGETHER, Forecast, on_cluster, what_if
from weft.predict.measurements import Measurements
from weft.predict.profile import MachineMeasurement

UNIFORM = "uniform"


@cache
def planned(on: str = "16xa100-80gb", *, price: float | None = None, **pins: object) -> PlannedJob:
    run = run_of_keywords(
        model="gpt2",
        on=on,
        global_batch=64,
        sequence=None,
        precision="fp16",
        pins={"planner": UNIFORM, **pins},
    )
    problem = problem_of_run(run)
    if price is not None:
        cluster = problem.job.cluster
        groups = tuple(
            replace(group, device=replace(group.device, price_per_hour=price)) for group in cluster.groups
        )
        problem = replace(problem, job=replace(problem.job, cluster=replace(cluster, groups=groups)))
    return plan_run(run, problem=problem)


def asked(job: PlannedJob, *changes: str, home: Path) -> dict[str, Forecast]:
    return {one.change: one for one in what_if(job, UNIFORM, changes, home=home)}


def test_each_change_is_answered_alone_and_all_together(tmp_path: Path) -> None:
    job = planned()
    found = asked(job, "inter 1 Gbit/s", "+1  node a100-80gb", home=tmp_path)
    assert list(found) == ["", "inter 1 Gbit/s", "+1 node a100-80gb", TOGETHER]
    assert found[""].step_s == job.prediction.step_s
    assert found[""].against is None
    assert found["inter 1 Gbit/s"].step_s > found[""].step_s
    assert found["+1 node a100-80gb"].cluster.ranks == 24
    assert found[TOGETHER].cluster.ranks == 24
    for one in found.values():
        assert one.step_s is not None
        assert one.tokens_per_s == 64 * 1024 / one.step_s
        assert one.cost_per_million_tokens is None
        if one.change:
            assert one.against == one.step_s / found[""].step_s


def test_a_forecast_is_the_plan_of_that_cluster(tmp_path: Path) -> None:
    there = planned("8xa100-80gb").prediction
    found = asked(planned(), "-1 node a100-80gb", home=tmp_path)["-1 node a100-80gb"]
    assert there is not None
    assert found.step_s == there.step_s
    assert found.unchanged.verdict is Verdict.REFUSED
    assert found.unchanged.reason.endswith("16 ranks, the cluster has 8")


def test_the_plan_of_now_runs_on_a_larger_cluster_as_it_does_now(tmp_path: Path) -> None:
    found = asked(planned(), "+1 node a100-80gb", home=tmp_path)
    unchanged = found["+1 node a100-80gb"].unchanged
    assert unchanged.verdict is Verdict.FITS
    assert unchanged.plan is not None
    assert unchanged.prediction is not None
    assert unchanged.prediction.step_s == found[""].step_s


def test_what_does_not_fit_any_more_says_why(tmp_path: Path) -> None:
    found = asked(planned(), "memory 2 GB", home=tmp_path)["memory 2 GB"]
    assert found.best is None
    assert found.step_s is found.tokens_per_s is found.against is None
    assert "no layout fits; closest: pp" in found.reason
    assert found.unchanged.verdict is Verdict.TOO_BIG


def test_a_device_without_the_precision_is_an_answer(tmp_path: Path) -> None:
    run = run_of_keywords(
        model="gpt2", on="8xa100-80gb", global_batch=8, sequence=None, precision="bf16", pins={}
    )
    job = plan_run(run)
    (_, found) = what_if(job, "uniform", ["device t4"], home=tmp_path)
    assert found.reason == "t4 does not compute in bf16"


def test_degrees_that_do_not_divide_the_devices_are_an_answer(tmp_path: Path) -> None:
    job = planned(dp=16)
    found = asked(job, "-1 node a100-80gb", home=tmp_path)["-1 node a100-80gb"]
    assert found.best is None
    assert "8 devices" in found.reason


def test_prices_make_costs(tmp_path: Path) -> None:
    job = planned(price=1.5)
    found = asked(job, "inter 1 Gbit/s", "+1 node t4", "device t4", home=tmp_path)
    slow = found["inter 1 Gbit/s"]
    assert price_per_hour(slow.cluster) == 24.0
    tokens_per_hour = slow.tokens_per_s * 3600.0
    assert slow.cost_per_million_tokens == pytest.approx(24.0 / tokens_per_hour * 1e6)
    # Nobody has given a price of the other device.
    assert found["+1 node t4"].cost_per_million_tokens is None
    assert found["device t4"].cost_per_million_tokens is None


def test_every_mistake_is_told_before_anything_is_searched(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        what_if(planned(), UNIFORM, ["nothing", "+1 node none", "inter 1 Gbit/s"], home=tmp_path)
    assert len(caught.value.violations) == 2


def test_measured_links_count_no_more_when_described_ones_change(tmp_path: Path, monkeypatch) -> None:
    machine = MachineMeasurement(
        device="a100-80gb",
        matmul={},
        memory=(),
        launch_s=1e-5,
        instruction_s=0.0,
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        message=((1.0, 1e-3),),
        collectives={"all_reduce": {2: ((1.0, 1e-3),)}},
        spread=0.1,
    )
    monkeypatch.setattr("weft.planning.what_if.load_devices", lambda *given: Measurements(machine=machine))
    problem = planned().problem
    faster = parse_cluster("16xa100-80gb")
    group = faster.groups[0]
    slower = replace(faster, groups=(replace(group, link=replace(group.link, bytes_per_s=1e9)),))
    assert on_cluster(problem, faster, tmp_path).measurements.machine == machine
    changed = on_cluster(problem, slower, tmp_path).measurements.machine
    assert changed == replace(machine, message=(), collectives={})


def test_a_plan_that_no_layout_expresses_is_forecast(tmp_path: Path) -> None:
    run = run_of_keywords(
        model="candle-uno",
        on="8xv100-16gb",
        global_batch=64,
        sequence=None,
        precision="fp32",
        pins={"planner": "graphpipe"},
    )
    changes = ["intra 25 GB/s", "memory 2 GB"]
    as_it_is, slower, small, _ = what_if(plan_run(run), "graphpipe", changes, home=tmp_path)
    assert as_it_is.best is not None
    assert as_it_is.best.layout is None
    assert as_it_is.tokens_per_s
    assert slower.unchanged.step_s > as_it_is.best.step_s
    assert small.unchanged.verdict is Verdict.TOO_BIG
    assert slower.best is not None
    assert slower.best.step_s <= slower.unchanged.step_s
