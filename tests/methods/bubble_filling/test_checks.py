"""The checks name every wrong change of a right window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weft.methods.bubble_filling.checks import violations
from weft.methods.bubble_filling.work import Busy, DeviceStep, Placed, Window, WorkItem

BUSY = (
    Busy(0, 10, "forward", 0, 0),
    Busy(20, 30, "forward", 0, 1),
    Busy(40, 50, "backward", 0, 0),
    Busy(50, 60, "backward", 0, 1),
)
STEP = DeviceStep(BUSY, 80)
ITEMS = (
    WorkItem("A", 0, (3, 3), (0, 1), "forward"),
    WorkItem("inverse", 0, (5, 6), after=(0,)),
)
RIGHT = Window(
    1, (Placed(0, 0, 10, 0, 0), Placed(0, 1, 30, 0, 1), Placed(0, 1, 33, 1, 0), Placed(0, 3, 60, 1, 1))
)


def moved(place: int, **changes: object) -> Callable[[Window], Window]:
    def change(window: Window) -> Window:
        placed = list(window.placed)
        placed[place] = replace(placed[place], **changes)  # type: ignore[arg-type]
        return replace(window, placed=tuple(sorted(placed, key=lambda one: (one.step, one.start_s))))

    return change


def test_a_right_window_has_no_violations() -> None:
    assert violations(STEP, ITEMS, RIGHT) == ()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda window: replace(window, placed=window.placed[1:]), "A: piece 0 is placed 0 times, not once"),
        (lambda window: replace(window, placed=(*window.placed, window.placed[-1])), "is placed 2 times"),
        (moved(0, piece=2), "item 0 has no piece 2"),
        (moved(0, step=1), "step 1 is not one of 1 steps"),
        (lambda window: replace(window, placed=window.placed[::-1]), "comes earlier than"),
        (moved(0, start_s=9), "A, piece 0: starts at 9 s, before its gap is idle"),
        (moved(2, start_s=31), "inverse, piece 0: starts at 31 s, before its gap is idle"),
        (moved(2, start_s=36), "inverse, piece 0: ends at 41 s, after the next computation should start"),
        (moved(3, start_s=76), "window: steps grow by 2.0 s, but it states 0.0 s"),
        (moved(1, behind=0, start_s=13), "A: begins again before all that needs it has ended"),
        (moved(2, behind=3, start_s=66), "A: begins again before all that needs it has ended"),
    ],
)
def test_wrong_windows(change: Callable[[Window], Window], problem: str) -> None:
    found = violations(STEP, ITEMS, change(RIGHT))
    assert any(problem in str(one) for one in found), list(map(str, found))


def test_curvature_that_comes_behind_a_sum_keeps_that_order() -> None:
    items = (WorkItem("A", 0, (3,), (0,), "forward"), WorkItem("B", 0, (3,), (1,), "forward", after=(0,)))
    right = Window(1, (Placed(0, 0, 10, 0, 0), Placed(0, 1, 30, 1, 0)))
    assert violations(STEP, items, right) == ()
    wrong = Window(1, (Placed(0, 1, 30, 1, 0), Placed(0, 1, 33, 0, 0)))
    assert [str(one) for one in violations(STEP, items, wrong)] == ["B: a piece comes before the last of A"]


def test_work_that_makes_steps_longer_states_its_seconds() -> None:
    placed = (*RIGHT.placed[:3], replace(RIGHT.placed[3], start_s=76))
    assert violations(STEP, ITEMS, Window(1, placed, added_s=2)) == ()
