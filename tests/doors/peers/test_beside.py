"""A peer's word on every simulated plan, and what users name peers by."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors.peers.stand_ins import ANSWER, calculon

from weft.describe.layout import PartialLayout
from weft.doors.peers import named_peers
from weft.doors.peers.beside import ask_beside
from weft.doors.peers.calculon import Calculon
from weft.errors import InputError
from weft.planning.comparison import compare_planners
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
    answers = compare_planners(problem, ["uniform", "exhaustive", "amp"])
    beside = ask_beside(Calculon(program=calculon(tmp_path, BACKWARDS)), problem, answers)
    assert beside.peer == "calculon"
    steps = [one.step_s for one in beside.plans]
    assert steps == sorted(steps)
    assert len({one.candidate.plan.plan_id for one in beside.plans if one.candidate.plan}) == len(steps)
    assert {planner for one in beside.plans for planner in one.best_of} == {"uniform", "exhaustive", "amp"}
    none = [one for one in beside.both if one.candidate.layout.recompute == "none"]
    assert len({one.said.step_s for one in none}) == 4
    assert beside.agreement is not None
    assert beside.agreement < -0.5
    assert beside.reasons == ()


def test_plans_that_the_peer_cannot_say_are_counted_by_reason(tmp_path: Path) -> None:
    problem = problem_of(model="llama-1m", on="2xa100-80gb", global_batch=8, precision="fp16")
    answers = compare_planners(problem, ["uniform"])
    beside = ask_beside(Calculon(program=calculon(tmp_path, BACKWARDS)), problem, answers)
    assert beside.both == ()
    assert beside.agreement is None
    assert beside.reasons == (("it knows GPT's blocks only, not llama's", len(beside.plans)),)


def test_peers_are_named_with_their_clones(tmp_path: Path) -> None:
    calculon(tmp_path, "")
    (tmp_path / "cost_het_cluster.py").write_text("")
    peers = named_peers([f"metis={tmp_path}", f"calculon={tmp_path}"], python="python3.9", limit_s=5.0)
    (judge,), (planner,) = peers.judges, peers.planners
    for program in (judge.program, planner.program):
        assert (program.root, program.python, program.limit_s) == (tmp_path, "python3.9", 5.0)
    assert (judge.program.name, planner.program.name) == ("calculon", "metis")
    assert named_peers([]) == named_peers(())


@pytest.mark.parametrize(
    ("words", "seconds", "problem"),
    [
        (
            ["calculon"],
            1.0,
            "--peer: 'calculon' names no folder with a clone of calculon (nearest valid: calcu",
        ),
        (["metis=/nowhere"], 1.0, "--peer: 'metis=/nowhere' names no folder with a clone of metis"),
        (["calculus=."], 1.0, "--peer: 'calculus' is not one of calculon, metis (nearest valid: calculon)"),
        (["metis=CLONE", "metis=CLONE"], 1.0, "--peer: metis is named twice"),
        (
            ["metis=CLONE", "calculon=CLONE"],
            1.0,
            "--peer calculon: CLONE has no bin/calculon; it must be a clone",
        ),
        (["metis=."], 0.0, "--peer-seconds: 0: a program needs some seconds (nearest valid: 300)"),
        (["metis=."], float("nan"), "--peer-seconds: nan: a program needs some seconds"),
    ],
)
def test_peers_that_are_none(tmp_path: Path, words: list[str], seconds: float, problem: str) -> None:
    (tmp_path / "cost_het_cluster.py").write_text("")
    with pytest.raises(InputError) as caught:
        named_peers([word.replace("CLONE", str(tmp_path)) for word in words], limit_s=seconds)
    assert str(caught.value).startswith(problem.replace("CLONE", str(tmp_path)))
