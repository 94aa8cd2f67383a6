"""Plans that would fit by a narrow margin only are no answers, unless the user accepts the risk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.cli.main import run as weft
from weft.describe.layout import Layout
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.planners.weft import WeftPlanner
from weft.planning.problem import Problem, problem_of

LAYOUT = Layout(pp=2, dp=2, loops=1, micro_batch_size=4, schedule="1f1b")


def posed(memory_bytes: int, reserve_bytes: int = 0, **options: object) -> Problem:
    problem = problem_of(model="gpt2", on="4xv100-16gb", global_batch=32, precision="fp16", **options)  # type: ignore[arg-type]
    (group,) = problem.job.cluster.groups
    device = replace(group.device, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)
    cluster = replace(problem.job.cluster, groups=(replace(group, device=device),))
    return replace(problem, job=replace(problem.job, cluster=cluster))


def judged(problem: Problem) -> Candidate:
    asked = Candidate(layout=LAYOUT, verdict=Verdict.PRUNED, reason="")
    return simulated(problem, asked, Bounds(problem).layer_seconds(LAYOUT))


def test_a_near_miss_says_its_odds() -> None:
    prediction = judged(posed(2**34)).prediction
    assert prediction is not None
    room = max(prediction.needs_at(0.2))
    missed = judged(posed(room))
    assert missed.verdict is Verdict.TOO_BIG
    assert missed.reason.startswith("would not fit in 1 of 5: ")
    for risk, verdict in (0.19, Verdict.TOO_BIG), (0.21, Verdict.FITS):
        assert judged(posed(room, memory_risk=risk)).verdict is verdict
    assert "more than its device has" in judged(posed(max(prediction.peak_bytes) - 10**6)).reason


def test_no_plan_gets_the_reserve() -> None:
    prediction = judged(posed(2**34)).prediction
    assert prediction is not None
    room = max(prediction.needs_at(0.02))
    assert judged(posed(room)).verdict is Verdict.FITS
    assert judged(posed(room, reserve_bytes=2**20)).verdict is Verdict.TOO_BIG
    assert judged(posed(room + 2**20, reserve_bytes=2**20)).verdict is Verdict.FITS


@pytest.mark.parametrize("risk", [0.5, 0.001])
def test_the_best_plan_keeps_the_accepted_risk(risk: float) -> None:
    """Also on devices that are only just large enough, where stages recompute as their room asks."""
    problem = posed(round(2.2 * 2**30), memory_risk=risk)
    best = WeftPlanner().search(problem).fitting[0]
    assert best.prediction is not None
    usable = [one.device.usable_bytes for one in problem.job.cluster.groups for _ in range(4)]
    assert best.prediction.chance_to_fit(usable) >= 1.0 - risk - 1e-6


def test_the_command_takes_a_risk(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt-1m", "--on", "2xv100-16gb", "--global-batch", "8", "--sequence", "64", "--top", "1"]
    assert weft([*words, "--memory-risk", "0.1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "(accepted risk 10%); 537 MB of v100-16gb stay in reserve, and communicators take " in told
    assert weft([*words, "--memory-risk", "0.1", "--json"]) == 0
    (candidate,) = json.loads(capsys.readouterr().out)["candidates"]
    assert candidate["peak_high_bytes"] > candidate["peak_bytes"]
    for refused in ("0", "2"):
        assert weft([*words, "--memory-risk", refused]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "memory_risk" in line
