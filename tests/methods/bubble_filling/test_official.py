"""The published way places as published: its program was run on the same times."""

from __future__ import annotations

import pytest
from bubble_usage import filled_utilisation, utilisation
from published_blocks import BASE_8, BASE_32, LARGE_32, Block, pipeline, works

from weft.methods.bubble_filling.placement.official import official
from weft.methods.bubble_filling.work import Busy, DeviceStep, WorkItem


def two_stages() -> tuple[DeviceStep, DeviceStep]:
    """GPipe with two micro-batches; a forward pass takes 10, a backward one 20."""
    first = (
        Busy(0, 10, "forward", 0, 0),
        Busy(10, 20, "forward", 0, 1),
        Busy(50, 70, "backward", 0, 0),
        Busy(70, 90, "backward", 0, 1),
    )
    second = (
        Busy(10, 20, "forward", 1, 0),
        Busy(20, 30, "forward", 1, 1),
        Busy(30, 50, "backward", 1, 0),
        Busy(50, 70, "backward", 1, 1),
    )
    return DeviceStep(first, 90), DeviceStep(second, 90)


def one_layer(stage: int) -> tuple[WorkItem, ...]:
    return (
        WorkItem("A", stage, (4, 4), (0, 1), "forward"),
        WorkItem("B", stage, (4, 4), (0, 1), "backward"),
        WorkItem("inverse of A", stage, (12,), after=(0,)),
        WorkItem("inverse of B", stage, (12,), after=(1,)),
    )


@pytest.mark.parametrize(
    ("stage", "steps", "share", "placed"),
    [
        (0, 2, 0.8889, [(0, 20, 0), (0, 24, 0), (0, 28, 2), (1, 20, 1), (1, 24, 1), (1, 28, 3)]),
        (1, 3, 0.8148, [(0, 70, 0), (0, 74, 0), (0, 78, 1), (0, 82, 1), (1, 70, 2), (2, 70, 3)]),
    ],
)
def test_two_stages(stage: int, steps: int, share: float, placed: list[tuple[int, float, int]]) -> None:
    step, items = two_stages()[stage], one_layer(stage)
    window = official(step, items)
    assert (window.steps, window.added_s) == (steps, 0)
    assert filled_utilisation(step, items, window) == pytest.approx(share, abs=5e-5)
    assert [(one.step, one.start_s, one.item) for one in window.placed] == placed


@pytest.mark.parametrize(
    ("block", "schedule", "devices", "before", "steps", "after"),
    [
        (BASE_32, "gpipe", 4, 57.1, [3, 3, 3, 3], [88.7, 88.7, 88.7, 88.7]),
        (BASE_32, "1f1b", 4, 57.1, [3, 4, 3, 3], [88.7, 80.8, 88.7, 88.7]),
        (BASE_32, "chimera", 4, 76.1, [9] * 4, [90.1] * 4),
        (LARGE_32, "gpipe", 8, 53.3, [2] * 8, [90.1] * 8),
        (LARGE_32, "1f1b", 8, 53.3, [2, 3, 2, 2, 2, 2, 2, 2], [90.1, 77.8, *[90.1] * 6]),
        (LARGE_32, "chimera", 8, 68.0, [4] * 8, [91.5] * 8),
        # One inversion is longer than every gap of stage 2.
        (BASE_8, "gpipe", 4, 57.1, [8, 8, 3, 8], [81.0, 81.0, 120.9, 81.0]),
    ],
)
def test_published_blocks(
    block: Block, schedule: str, devices: int, before: float, steps: list[int], after: list[float]
) -> None:
    found = pipeline(block, schedule, devices, devices)
    items = works(block, schedule, found)
    windows = [official(*one) for one in zip(found, items, strict=True)]
    assert [window.steps for window in windows] == steps
    shares = [100 * filled_utilisation(*one) for one in zip(found, items, windows, strict=True)]
    assert shares == pytest.approx(after, abs=0.06)
    assert [100 * utilisation(step) for step in found] == pytest.approx([before] * devices, abs=0.06)
    assert [window.added_s > 0 for window in windows] == [share > 100 for share in after]


def test_a_step_that_completes_no_item_is_the_last_one() -> None:
    """The published program counts items, not pieces, that an added step takes; the rest makes it longer."""
    step = DeviceStep((Busy(0, 10, "forward", 0, 0), Busy(15, 20, "backward", 0, 0)), 20)
    items = (WorkItem("A", 0, (4,), (0,), "forward"), WorkItem("inverse of A", 0, (3, 3, 3), after=(0,)))
    window = official(step, items)
    assert (window.steps, window.added_s) == (2, 6)
    assert [(one.step, one.start_s) for one in window.placed] == [(0, 10), (1, 10), (1, 20), (1, 23)]


def test_sums_of_two_windows_are_not_mixed() -> None:
    """The inversion fits behind the first micro-batch of the next window, which must not be in its sum."""
    busy = (
        Busy(0, 10, "forward", 0, 0),
        Busy(30, 40, "forward", 0, 1),
        Busy(45, 50, "backward", 0, 0),
        Busy(50, 55, "backward", 0, 1),
    )
    step = DeviceStep(busy, 55)
    items = (WorkItem("A", 0, (4, 4), (0, 1), "forward"), WorkItem("inverse of A", 0, (12,), after=(0,)))
    window = official(step, items)
    assert window.steps == 2
    assert [(one.step, one.start_s, one.item) for one in window.placed] == [
        (0, 10, 0),
        (0, 40, 0),
        (1, 10, 1),
    ]
