"""The examples of breadth-first pipelines: their parts, on small questions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from example_modules import importable_from

from weft.describe.layout import PartialLayout
from weft.planning.curve import BREADTH_FIRST, GPIPE, METHODS, RIVALS, Curve, curve
from weft.planning.problem import problem_of

FOLDER = Path(__file__).parents[2] / "examples" / "breadth-first"

SHARES = (0.25, 2.0)


@pytest.fixture(autouse=True)
def _beside_the_examples() -> Iterator[None]:
    with importable_from(FOLDER):
        yield


def test_efficiency_grows_with_loops_at_one_micro_batch_per_device() -> None:
    efficiency = importlib.import_module("efficiency")
    job = replace(problem_of(model="gpt-52b", on="64xv100-32gb", precision="fp16").job, global_batch=8)
    one, four = (efficiency.efficiency(job, "breadth-first", loops) for loops in (1, 4))
    assert 0 < one < four < 1
    assert efficiency.peak_in_flight("breadth-first") == efficiency.peak_in_flight("depth-first") == 64


def test_claims_say_whether_they_hold_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    claims = importlib.import_module("claims")
    claims.say("a", paper="1", predicted="2", holds=True, why_not="never")
    claims.say("b", paper="1", predicted="0", holds=False, why_not="rain")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "holds a",
        "paper: 1; predicted: 2",
        "DOES NOT HOLD b",
        "paper: 1; predicted: 0",
        "because rain",
    ]


def test_methods_says_all_gains_and_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    methods = importlib.import_module("methods")
    answer = curve(
        problem_of(model="gpt-1m", on="16xv100-32gb", precision="fp16"), samples_per_device=(0.5, 1.0)
    )
    methods.say_gains(answer, "some")
    said = capsys.readouterr().out
    assert said.count("breadth-first is best at") == 2
    assert said.count("schedule ") == said.count("implementation ") == 4


@cache
def small_curve() -> Curve:
    problem = problem_of(model="gpt-1m", on="16xv100-32gb", precision="fp16")
    return curve(problem, samples_per_device=SHARES)


def test_gains_split_into_schedule_and_implementation() -> None:
    methods, small = importlib.import_module("methods"), small_curve()
    found = methods.gains(small)
    assert len(found) == len(RIVALS) * len(SHARES)
    for gain in found:
        ours = small.point(BREADTH_FIRST.name, gain.samples_per_device).step_s
        shipped = small.point(RIVALS[gain.rival].name, gain.samples_per_device).step_s
        assert gain.total == pytest.approx(shipped / ours - 1)
        assert gain.implementation >= 0


def test_the_least_memory_is_not_above_that_of_the_fastest_layout() -> None:
    methods, small = importlib.import_module("methods"), small_curve()
    for method in METHODS:
        found = methods.least_memory(small.problem, method, 2.0).candidate
        fastest = small.point(method.name, 2.0).candidate
        assert found is not None
        assert fastest is not None
        assert method.admits(found.layout)
        assert found.layout.recompute == "full"
        assert found.peak_bytes <= fastest.peak_bytes
    pinned = replace(small.problem, pins=PartialLayout(sharding="zero-1", recompute="none"))
    found = methods.least_memory(pinned, GPIPE, 2.0).candidate
    assert found is not None
    assert (found.layout.sharding, found.layout.recompute) == ("zero-1", "none")
    nothing = methods.least_memory(
        problem_of(model="gpt-52b", on="4xv100-32gb", precision="fp16"), GPIPE, 1.0
    )
    assert nothing.candidate is None
    assert "more than any device has" in nothing.reason
