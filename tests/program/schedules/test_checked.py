"""Wrong answers of schedules of other packages are one line with the schedule's name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installing import register

from weft.cli.main import run
from weft.errors import InputError
from weft.program.schedules import get_schedule
from weft.program.schedules.base import ComputeOrder, Pipeline
from weft.program.schedules.checked import CheckedSchedule
from weft.program.schedules.gpipe import GPipe

PIPELINE = Pipeline(2, 2, 2)
RIGHT = GPipe().order(PIPELINE, 0, {})
NO_ORDER = "order returns no ComputeOrder of three integer arrays of equal length"


class Odd(GPipe):
    """A schedule with given answers."""

    name = "odd"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def placement(self, pipeline: Pipeline) -> Any:
        return self.answers["placement"]

    def order(self, *_: Any) -> Any:
        return self.answers["order"]


@pytest.mark.parametrize(
    ("placed", "problem"),
    [
        (np.array([0, 2]), "placement returns [0, 2]; devices are 0 to 1"),
        (np.array([-1, 0]), "placement returns [-1, 0]; devices are 0 to 1"),
        (np.array([0]), "placement returns no device for each of 2 stages"),
        (None, "placement returns no device for each of 2 stages"),
    ],
)
def test_a_wrong_placement(placed: Any, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        CheckedSchedule(Odd(placement=placed)).placement(PIPELINE)
    assert str(refused.value) == f"schedule odd: {problem}"


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (ComputeOrder(*(column.tolist() for column in RIGHT)), NO_ORDER),
        (None, NO_ORDER),
        (RIGHT._replace(stage=RIGHT.stage[1:]), NO_ORDER),
        (RIGHT._replace(stage=RIGHT.stage + 2), "order returns a stage that is not among 0 to 1"),
        (
            RIGHT._replace(micro_batch=RIGHT.micro_batch - 1),
            "order returns a micro_batch that is not among 0 to 1",
        ),
        (RIGHT._replace(kind=RIGHT.kind + 99), "order returns a kind that is no computation"),
    ],
    ids=str,
)
def test_a_wrong_order(order: Any, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        CheckedSchedule(Odd(order=order)).order(PIPELINE, 0, {})
    assert str(refused.value) == f"schedule odd: {problem}"


def test_right_answers_and_other_members_stay() -> None:
    checked = copy.deepcopy(CheckedSchedule(GPipe()))
    assert checked.placement(PIPELINE).tolist() == [0, 1]
    assert all(map(np.array_equal, checked.order(PIPELINE, 0, {}), RIGHT))
    assert (checked.name, checked.__doc__) == ("gpipe", GPipe.__doc__)
    assert checked.refuse(Pipeline(2, 3, 2), {}) == GPipe().refuse(Pipeline(2, 3, 2), {})
    assert not hasattr(checked, "paths")


def test_an_installed_schedule_that_fails_is_one_line(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "from weft.program.schedules.gpipe import GPipe\n\n\nclass Failing(GPipe):\n    name = 'failing'\n\n"
    )
    (packages / "weft_failing.py").write_text(text + "    def order(self, *_):\n        return 1 / 0\n")
    register(packages, "failing", {"weft.schedules": {"failing": "weft_failing:Failing"}})
    assert get_schedule("failing").name == "failing"
    assert run(["schedule", "failing", "--ranks", "2"]) == 2
    line = "schedule failing: order fails: ZeroDivisionError: division by zero (weft_failing.py, line 8)"
    assert capsys.readouterr().err == f"weft: {line}\n"
