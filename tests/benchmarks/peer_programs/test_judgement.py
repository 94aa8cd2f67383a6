"""Calculon's word on every simulated plan."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peer_programs.stand_ins import ANSWER, calculon

from benchmarks.peer_programs.calculon import Calculon
from benchmarks.peer_programs.judgement import judge
from weft.describe.layout import PartialLayout
from weft.planning.comparison import compare_planners
from weft.planning.planners import get_planner
from weft.planning.problem import problem_of

# The larger the micro-batch the longer its step, which the simulator sees the other way round.
BACKWARDS = (
    "told = json.load(open(execution))\n"
    f"answer = {ANSWER!r}\n"
    "answer['fw_time'] += told['microbatch_size']; answer['total_time'] += told['microbatch_size']\n"
    "json.dump(answer, open(stats, 'w'))\n"
)


def test_both_rankings_are_compared_over_the_plans_that_both_can_say(tmp_path: Path) -> None:
    pins = PartialLayout(dp=1, pp=1, tp=1, schedule="1f1b")
    problem = problem_of(model="gpt-1m", on="1xa100-80gb", global_batch=8, precision="fp16", pins=pins)
    answers = compare_planners(problem, [get_planner(name) for name in ("uniform", "exhaustive", "amp")])
    judgement = judge(Calculon(program=calculon(tmp_path, BACKWARDS)), problem, answers)
    assert judgement.as_record()["peer"] == "calculon"
    steps = [one.step_s for one in judgement.plans]
    assert steps == sorted(steps)
    assert len({one.candidate.plan.plan_id for one in judgement.plans if one.candidate.plan}) == len(steps)
    assert {planner for one in judgement.plans for planner in one.best_of} == {"uniform", "exhaustive", "amp"}
    none = [one for one in judgement.both if one.candidate.layout.recompute == "none"]
    assert len({one.said.step_s for one in none}) == 4
    assert judgement.agreement is not None
    assert judgement.agreement < -0.5
    assert judgement.reasons == ()


def test_plans_that_the_peer_cannot_say_are_counted_by_reason(tmp_path: Path) -> None:
    problem = problem_of(model="llama-1m", on="2xa100-80gb", global_batch=8, precision="fp16")
    answers = compare_planners(problem, [get_planner("uniform")])
    judgement = judge(Calculon(program=calculon(tmp_path, BACKWARDS)), problem, answers)
    assert judgement.both == ()
    assert judgement.agreement is None
    assert judgement.reasons == (("it knows GPT's blocks only, not llama's", len(judgement.plans)),)
