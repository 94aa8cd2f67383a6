"""A step says that it is host-bound if launches take most of its passes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

import weft
from weft.cli.tables.plan import LAUNCHING_SHARE, breakdown_text
from weft.describe.plan import Launch
from weft.describe.run_file import parse_run
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.predict.corrections import Correction
from weft.predict.cost.host_launches import HALF_WIDTH
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.pricing import Pricing


def with_launches(times: float) -> PlannedJob:
    """gpt-1m on devices that launch kernels so much more slowly."""
    job = weft.plan(model="gpt-1m", on="2xh100-80gb", global_batch=16, pp=2, dp=1, tp=1).job
    (group,) = job.problem.job.cluster.groups
    slower = replace(group, device=replace(group.device, launch_s=times * group.device.launch_s))
    cluster = replace(job.problem.job.cluster, groups=(slower,))
    problem = replace(job.problem, job=replace(job.problem.job, cluster=cluster))
    return replace(job, problem=problem, chosen_for=None)


def test_the_share_grows_with_the_time_of_a_launch_until_all_devices_wait() -> None:
    shares = [with_launches(times).launching_share for times in (0.0, 0.01, 0.05, 1.0, 10.0)]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert shares[1] < shares[2] < shares[3] == shares[-1] == 1.0


@pytest.mark.parametrize("plan", [{"pp": 2, "dp": 1, "tp": 1}, {"pp": 1, "dp": 1, "tp": 2}])
def test_a_host_runs_ahead_of_its_device_until_it_has_issued_all_kernels(plan: dict[str, int]) -> None:
    """A micro-batch's passes take what the device and the exchanges need, or what the host needs."""
    job = weft.plan(model="gpt-1m", on="2xa100-40gb", global_batch=64, micro_batch_size=4, **plan).job
    placed = PlacedPlan(program=job.program, plan=job.plan, model=job.problem.cost_model)
    pricing, (stage, devices) = Pricing(program=job.program, placed=placed), (0, 0)
    exchanged_s = placed.exchanges_of(stage, 0).of_both("none")
    assert (exchanged_s > 0.0) == (plan["tp"] > 1)
    (alone,) = placed.stage_times[stage, devices]
    for part in (0.5, 0.9, 1.1, 3.0):
        slower = replace(alone, issue_s=part * (alone.passes_s + exchanged_s))
        vars(placed)["stage_times"] = {(stage, devices): (slower,)}
        (found,) = pricing.times_of("forward", stage, 0, 0, devices)
        needed_s = max(slower.issue_s, alone.passes_s + exchanged_s)
        assert found.passes_s + exchanged_s == pytest.approx(needed_s)
        # Both passes are as late, and a host that is nearly late is less certain.
        assert found.forward_s / found.passes_s == pytest.approx(alone.forward_s / alone.passes_s)
        latest = max(1.0 + alone.half_width, part * (1.0 + HALF_WIDTH))
        assert found.half_width == pytest.approx(latest / max(1.0, part) - 1.0)


def test_layers_that_are_compiled_or_captured_wait_less() -> None:
    job = with_launches(1.0)
    steps = [
        replace(job, plan=job.plan.model_copy(update={"launch": launch}), chosen_for=None).prediction.step_s
        for launch in get_args(Launch)
    ]
    assert steps == sorted(set(steps), reverse=True)


def test_a_run_file_compiles_and_so_does_its_plan() -> None:
    tables = {"model": {"preset": "gpt-1m"}, "cluster": {"use": "1xh100-80gb"}, "train": {"compile": True}}
    planned = plan_run(parse_run(tables))
    assert planned.plan.launch == "compiled"
    plain = planned.run.model_copy(update={"train": planned.run.train.model_copy(update={"compile": False})})
    assert planned.problem.subject(plain).pinned(planned.plan).run.train.compile


def test_a_correction_of_all_times_leaves_the_share() -> None:
    job = with_launches(10.0)
    faster = replace(job, problem=job.problem.corrected(Correction(step=0.5)))
    assert faster.launching_share == pytest.approx(job.launching_share, rel=1e-12)
    assert faster.launching_share <= 1.0


def test_large_kernels_hide_their_launches() -> None:
    large = weft.plan(model="llama-7b", on="8xh100-80gb", global_batch=8, pp=1, dp=1, tp=8).job
    assert large.launching_share < 0.3


def test_a_step_is_as_long_as_its_launches_if_kernels_do_nothing_else() -> None:
    one, two = (with_launches(times) for times in (100.0, 200.0))
    assert two.predicted.simulation.step_s == pytest.approx(2.0 * one.predicted.simulation.step_s, rel=0.02)


def test_a_device_that_is_its_own_host_waits_for_no_launch() -> None:
    job = with_launches(1.0)
    (group,) = job.problem.job.cluster.groups
    own_host = replace(group, device=replace(group.device, synchronous=True))
    cluster = replace(job.problem.job.cluster, groups=(own_host,))
    problem = replace(job.problem, job=replace(job.problem.job, cluster=cluster))
    assert replace(job, problem=problem).launching_share == 0.0


def test_the_breakdown_names_it_where_most_devices_wait() -> None:
    causes = {"forward": 0.5, "backward": 0.5}
    plain = breakdown_text(causes, LAUNCHING_SHARE / 2)
    assert "host-bound" not in plain
    assert breakdown_text(causes, 0.93) == (f"{plain}; host-bound: kernel launches take 93% of the passes")
