"""A step says that it is host-bound if launches take most of its passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft.cli.tables.plan import LAUNCHING_SHARE, breakdown_text
from weft.planning.planned import PlannedJob
from weft.predict.corrections import Correction


def with_launches(times: float) -> PlannedJob:
    """gpt-1m on devices that launch kernels so much more slowly."""
    job = weft.plan(model="gpt-1m", on="2xh100-80gb", global_batch=16, pp=2, dp=1, tp=1).job
    (group,) = job.problem.job.cluster.groups
    slower = replace(group, device=replace(group.device, launch_s=times * group.device.launch_s))
    cluster = replace(job.problem.job.cluster, groups=(slower,))
    problem = replace(job.problem, job=replace(job.problem.job, cluster=cluster))
    return replace(job, problem=problem, chosen_for=None)


def test_the_share_grows_with_the_time_of_a_launch() -> None:
    shares = [with_launches(times).launching_share for times in (0.0, 0.1, 1.0, 10.0)]
    assert shares[0] == 0.0
    assert shares == sorted(set(shares))
    assert 0.9 < shares[-1] <= 1.0


def test_a_correction_of_all_times_leaves_the_share() -> None:
    job = with_launches(10.0)
    faster = replace(job, problem=job.problem.corrected(Correction(step=0.5)))
    assert faster.launching_share == pytest.approx(job.launching_share, rel=1e-12)
    assert faster.launching_share <= 1.0


def test_large_kernels_hide_their_launches() -> None:
    large = weft.plan(model="llama-7b", on="8xh100-80gb", global_batch=8, pp=1, dp=1, tp=8).job
    assert large.launching_share < 0.1


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


def test_the_breakdown_names_it_from_a_half() -> None:
    causes = {"forward": 0.5, "backward": 0.5}
    plain = breakdown_text(causes, LAUNCHING_SHARE / 2)
    assert "host-bound" not in plain
    assert breakdown_text(causes, 0.83) == (f"{plain}; host-bound: kernel launches take 83% of the passes")
