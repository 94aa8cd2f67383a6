"""A search that is also asked for the precision finds what the searches of each precision find."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.describe.plan_subject import subject_of
from weft.describe.reading import parse_toml
from weft.describe.request import request_of_names
from weft.describe.run_file import RunFile, parse_run
from weft.errors import InputError
from weft.planning.goals import goal_value
from weft.planning.planned import plan_run, planned_for
from weft.planning.precisions import in_precision, precisions_of
from weft.planning.problem import problem_of_run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))


def run_file(on: str, *, precision: str = "any", minimise: str = "time") -> RunFile:
    return parse_run(
        parse_toml(
            f"""
        [model]
        preset = "gpt-1m"
        [task]
        kind = "causal-lm"
        data = "python-stdlib"
        sequence = 128
        [train]
        global_batch = 16
        precision = "{precision}"
        [cluster]
        use = "{on}"
        [goal]
        minimise = "{minimise}"
        """,
            "run.toml",
        )
    )


@pytest.mark.parametrize("minimise", ["time", "memory"])
def test_the_best_of_all_precisions_is_found_and_the_others_are_told(minimise: str) -> None:
    run = run_file("2xa100-80gb", minimise=minimise)
    assert precisions_of(run) == ("bf16", "fp32")
    each = {name: plan_run(in_precision(run, name)) for name in precisions_of(run)}
    values = {name: goal_value(one.problem, one.prediction, one.plan.ranks) for name, one in each.items()}
    found = plan_run(run)
    assert values["bf16"] != values["fp32"]
    assert goal_value(found.problem, found.prediction, found.plan.ranks) == min(values.values())
    best = min(values, key=values.__getitem__)
    assert found.plan == each[best].plan
    assert found.plan.precision == found.run.train.precision == found.problem.job.precision == best
    told = found.problem.assumed["precision"]
    assert told.startswith(f"{best}, the best")
    assert "bf16: " in told
    assert "fp32: " in told


def test_what_a_device_does_not_compute_is_not_searched() -> None:
    run = run_file("1xa100-80gb+1xt4")
    assert precisions_of(run) == ("fp16", "fp32")
    assert plan_run(run).plan.precision == "fp16"


def test_a_given_plan_has_the_precision_it_says() -> None:
    plan = plan_run(run_file("2xa100-80gb", precision="fp32")).plan
    assert planned_for(subject_of(run_file("2xa100-80gb")), plan).problem.job.precision == "fp32"


def test_nothing_that_fits_is_said_once() -> None:
    run = run_file("1xt4")
    run = run.model_copy(update={"model": run.model.model_copy(update={"preset": "gpt-52b"})})
    with pytest.raises(InputError, match="no layout fits"):
        plan_run(run)


def test_one_problem_has_one_precision() -> None:
    with pytest.raises(InputError, match=r"train\.precision: 'any' is for a search of one best plan"):
        problem_of_run(run_file("2xa100-80gb"))


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("8xa100-80gb", "bf16"),
        ("8xt4", "fp16"),
        ("8xa100-80gb+4xt4", "fp16, since t4 cannot compute in bf16; leave them out, or give --precision"),
    ],
)
def test_devices_that_keep_others_from_bf16_are_named(on: str, said: str) -> None:
    assert request_of_names(model="gpt-1m", on=on).assumed["precision"] == said
