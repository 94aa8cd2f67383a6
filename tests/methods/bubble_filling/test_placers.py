"""Every way to place work does all of it once, in order, in gaps; weft's takes the fewest steps it can."""

from __future__ import annotations

import pytest
from bubble_usage import (
    completed_after,
    filled_utilisation,
    least_steps,
)
from hypothesis import given
from hypothesis import strategies as st
from methods.bubble_filling.random_work import Case, cases
from published_blocks import BASE_8, BASE_32, LARGE_32, Block, pipeline, works

from weft.methods.bubble_filling.checks import violations
from weft.methods.bubble_filling.placement.greedy import greedy
from weft.methods.bubble_filling.placement.official import official
from weft.methods.bubble_filling.work import Busy, DeviceStep, WorkItem

MARGINS = st.sampled_from([0.0, 0.05, 0.3])
MOST_STEPS = st.sampled_from([1, 2, 3, 64])


@pytest.mark.parametrize("placer", [official, greedy])
@given(case=cases(), margin=MARGINS, most_steps=MOST_STEPS)
def test_windows_may_be_executed(placer: object, case: Case, margin: float, most_steps: int) -> None:
    assert callable(placer)
    window = placer(case.step, case.items, margin=margin, most_steps=most_steps)
    assert violations(case.step, case.items, window) == ()
    assert window.steps <= most_steps
    assert window == placer(case.step, case.items, margin=margin, most_steps=most_steps)
    if window.added_s == 0:
        assert window.steps >= least_steps(case.step, case.items)
        assert filled_utilisation(case.step, case.items, window) <= 1 + 1e-9


@given(case=cases(), margin=MARGINS, most_steps=MOST_STEPS)
def test_pieces_keep_their_margins(case: Case, margin: float, most_steps: int) -> None:
    window = greedy(case.step, case.items, margin=margin, most_steps=most_steps)
    for one in window.placed:
        ends_s = one.start_s + (1 + margin) * case.items[one.item].pieces_s[one.piece]
        if one.behind + 1 < len(case.step.busy):
            assert ends_s <= case.step.busy[one.behind + 1].start_s + 1e-9


@given(case=cases(), margin=MARGINS)
def test_weft_takes_no_more_steps_than_the_published_way(case: Case, margin: float) -> None:
    published = official(case.step, case.items, margin=margin)
    window = greedy(case.step, case.items, margin=margin)
    if published.added_s == 0:
        assert window.added_s == 0
        assert window.steps <= published.steps


@given(case=cases(), most_steps=MOST_STEPS)
def test_statistics_are_at_most_two_windows_old(case: Case, most_steps: int) -> None:
    """A result that is complete so many steps after its captures is used for a window from then on.

    Where the published way takes fewer steps than sweeps, its window may have older statistics.
    """
    window = greedy(case.step, case.items, most_steps=most_steps)
    if window != official(case.step, case.items, most_steps=most_steps):
        oldest = max(completed_after(case.step, case.items, window)) + window.steps - 1
        assert oldest < 2 * window.steps


@pytest.mark.parametrize(
    ("block", "schedule", "devices", "steps"),
    [
        (BASE_32, "1f1b", 4, 3),
        (BASE_32, "chimera", 4, 6),
        (LARGE_32, "1f1b", 8, 2),
        (LARGE_32, "chimera", 8, 3),
    ],
)
def test_published_blocks_take_the_least_steps(block: Block, schedule: str, devices: int, steps: int) -> None:
    found = pipeline(block, schedule, devices, devices)
    items = works(block, schedule, found)
    assert [greedy(*one).steps for one in zip(found, items, strict=True)] == [steps] * devices
    assert {least_steps(*one) for one in zip(found, items, strict=True)} == {steps}


def test_an_item_longer_than_every_gap_makes_steps_longer_alone() -> None:
    """The largest inversion takes 33.2 ms; the gaps of stage 2 are of 16.4, 22.2 and 27.9 ms."""
    step = pipeline(BASE_8, "gpipe", 4, 4)[2]
    (items,) = works(BASE_8, "gpipe", [step])
    window, published = greedy(step, items), official(step, items)
    longer = {
        one.item for one in window.placed if one.start_s + items[one.item].pieces_s[one.piece] > step.end_s
    }
    assert [items[one].pieces_s for one in longer] == [(pytest.approx(0.033226, abs=1e-7),)] * len(longer)
    assert 0 < window.added_s < published.added_s
    (cut,) = works(BASE_8, "gpipe", [step], cuts=4)
    whole = greedy(step, cut)
    assert (whole.steps, whole.added_s) == (5, 0)
    assert filled_utilisation(step, cut, whole) == pytest.approx(0.954, abs=5e-4)


def test_early_gaps_take_work_of_the_window_before() -> None:
    """The only gap stands before all passes; one step holds the work of the passes of the step before."""
    step = DeviceStep((Busy(20, 30, "forward", 0, 0), Busy(30, 40, "backward", 0, 0)), 40)
    items = (WorkItem("B", 0, (4,), (0,), "backward"), WorkItem("inverse of B", 0, (12,), after=(0,)))
    window = greedy(step, items)
    assert (window.steps, [one.start_s for one in window.placed]) == (1, [0, 4])
    assert completed_after(step, items, window) == (1, 1)


def test_no_gaps_leave_all_work_to_the_end() -> None:
    step = DeviceStep((Busy(0, 10, "forward", 0, 0), Busy(10, 30, "backward", 0, 0)), 30)
    items = (WorkItem("B", 0, (4,), (0,), "backward"), WorkItem("inverse of B", 0, (12,), after=(0,)))
    for placer in (official, greedy):
        assert placer(step, items).added_s == 16
    assert least_steps(step, items) == float("inf")


def test_no_work_takes_one_step() -> None:
    step = DeviceStep((Busy(0, 10, "forward", 0, 0), Busy(20, 30, "backward", 0, 0)), 30)
    for placer in (official, greedy):
        assert placer(step, ()).steps == 1
    assert least_steps(step, ()) == 1
