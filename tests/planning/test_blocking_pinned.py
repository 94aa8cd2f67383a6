"""Communication that is waited for, pinned: searched, simulated, and refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import weft
from weft.describe.layout import PartialLayout
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.planning.curve import curve
from weft.planning.planners import Ranking, get_planner
from weft.planning.problem import Problem, problem_of, problem_of_run

BOTH = ("messages", "reductions")


def posed(**pins: object) -> Problem:
    decided = PartialLayout.model_validate({"recompute": "none", "micro_batch_size": 2, **pins})
    return problem_of(model="gpt-1m", on="4xa100-80gb", global_batch=16, precision="fp32", pins=decided)


def search(problem: Problem, planner: str = "exhaustive") -> Ranking:
    return get_planner(planner).search(problem)


def steps_of(ranking: Ranking) -> dict[str, float]:
    """Seconds of every layout that was simulated, by its text without what it waits for."""
    return {
        str(replace(one.layout, blocking=())): one.step_s
        for one in ranking.candidates
        if one.prediction is not None
    }


@pytest.mark.parametrize("planner", ["weft", "homogeneous", "megatron", "uniform", "random"])
def test_every_planner_holds_to_what_is_pinned(planner: str) -> None:
    ranking = search(posed(pp=2, schedule="1f1b", loops=1, blocking=list(BOTH)), planner)
    assert ranking.fitting
    assert {one.layout.blocking for one in ranking.candidates} == {BOTH}
    assert {one.plan.blocking for one in ranking.fitting} == {BOTH}


def test_steps_that_wait_are_simulated_and_take_no_less() -> None:
    pins = {"pp": 2, "dp": 2, "sharding": "zero-1"}
    waiting = search(posed(**pins, blocking=["messages"]))
    waits, overlapped = steps_of(waiting), steps_of(search(posed(**pins)))
    reasons = {str(replace(one.layout, blocking=())): one.reason for one in waiting.candidates}
    # Some orders do without an answer only where messages run beside computations.
    assert len(waits) > len(overlapped) / 2
    assert all("wait for each other" in reasons[layout] for layout in overlapped.keys() - waits.keys())
    assert all(waits[layout] >= overlapped[layout] for layout in waits)
    assert any(waits[layout] > overlapped[layout] for layout in waits)


def test_nothing_pinned_to_wait_is_as_left_open() -> None:
    pins = {"pp": 2, "dp": 2, "schedule": "1f1b", "sharding": "zero-1"}
    assert steps_of(search(posed(**pins, blocking=[]))) == steps_of(search(posed(**pins)))


@pytest.mark.parametrize("words", [["gathers"], ["reductions"], ["gathers", "reductions"]])
def test_replicas_that_shard_weights_wait_in_turn(words):
    pins = {"dp": 4, "pp": 1, "schedule": "breadth-first", "sharding": "zero-3"}
    overlapped, waiting = steps_of(search(posed(**pins))), steps_of(search(posed(**pins, blocking=words)))
    shared = overlapped.keys() & waiting.keys()
    assert shared
    assert all(waiting[layout] >= overlapped[layout] for layout in shared)
    assert any(waiting[layout] > overlapped[layout] for layout in shared)


def test_the_curve_compares_programs_that_wait_with_others() -> None:
    with pytest.raises(InputError, match=r"blocking: messages is pinned; the curve compares"):
        curve(posed(blocking=["messages"]), samples_per_device=(1.0,))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["mesages"], r"plan.blocking\[0\]: 'mesages': must be .* \(nearest valid: messages\)"),
        (["messages", "messages"], "plan.blocking: messages, messages: each can be named once"),
    ],
)
def test_words_of_a_run_file_that_are_refused(given: list[str], line: str) -> None:
    with pytest.raises(InputError, match=line):
        parse_run({"plan": {"blocking": given}})


def test_a_run_file_and_python_say_the_same() -> None:
    words = {"model": {"preset": "gpt-1m"}, "cluster": {"use": "2xa100-80gb"}}
    run = parse_run({**words, "plan": {"blocking": ["reductions", "messages"]}})
    assert problem_of_run(run).pins.blocking == BOTH
    planned = weft.plan(model="gpt-1m", on="2xa100-80gb", global_batch=8, pp=2, blocking="messages")
    assert planned.plan.blocking == ("messages",)


def test_a_plan_that_waits_is_not_trained(tmp_path: Path) -> None:
    planned = weft.plan(model="gpt-1m", global_batch=8, pp=1, dp=1, blocking="messages")
    with pytest.raises(InputError, match="blocking messages is not supported by this runtime yet"):
        weft.train(planned, directory=tmp_path / "run", steps=1)
