"""The solver's windows have the fewest steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bubble_usage import least_steps
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from methods.bubble_filling.random_work import Case, cases

from weft.errors import InputError
from weft.methods.bubble_filling.checks import violations
from weft.methods.bubble_filling.placement.exact import exact, solved
from weft.methods.bubble_filling.placement.greedy import greedy
from weft.methods.bubble_filling.placement.prepared import Work
from weft.methods.bubble_filling.work import Busy, DeviceStep, WorkItem

SMALL = cases(most_micro_batches=2, most_layers=1)


def steps_of(case: Case, margin: float = 0.05) -> int | None:
    """The fewest steps; None where work makes steps longer, or the solver refuses."""
    try:
        window = exact(case.step, case.items, margin=margin)
    except InputError:
        return None
    assert violations(case.step, case.items, window) == ()
    return window.steps if window.added_s == 0 else None


@settings(max_examples=25, deadline=None)
@given(case=SMALL)
def test_never_more_than_greedy_never_less_than_the_ratio(case: Case) -> None:
    found, window = steps_of(case), greedy(case.step, case.items)
    if found is not None:
        assert least_steps(case.step, case.items) <= found
        assert window.added_s > 0 or found <= window.steps


# Of 25 pairs drawn one by one, as many are unequal.
@settings(max_examples=17, deadline=None)
@given(case=SMALL, margins=st.sampled_from([(0.0, 0.05), (0.0, 0.2), (0.05, 0.2)]))
def test_a_smaller_margin_never_takes_more_steps(case: Case, margins: tuple[float, float]) -> None:
    less, more = (steps_of(case, margin) for margin in margins)
    if less is not None and more is not None:
        assert less <= more


@settings(max_examples=25, deadline=None)
@given(case=SMALL, share=st.sampled_from([0.5, 0.9]))
def test_shorter_pieces_never_take_more_steps(case: Case, share: float) -> None:
    shorter = tuple(
        replace(item, pieces_s=tuple(share * one for one in item.pieces_s)) for item in case.items
    )
    less, more = steps_of(Case(case.step, shorter)), steps_of(case)
    if less is not None and more is not None:
        assert less <= more


@settings(max_examples=25, deadline=None)
@given(case=SMALL, margin=st.sampled_from([0.0, 0.05, 0.3]))
def test_the_solver_places_what_greedy_places(case: Case, margin: float) -> None:
    """In the same steps, and keeps margins and order by its own rows."""
    window, work = greedy(case.step, case.items, margin=margin), Work.of(case.step, case.items, margin)
    # Greedy may place an item that no gap holds with its margin, and the solver leaves that to it.
    assume(window.added_s == 0 and not work.long)
    try:
        found = solved(work, window.steps)
    except InputError:
        assume(False)
    assert found is not None
    assert found.steps == window.steps
    assert violations(case.step, case.items, found) == ()
    for one in found.placed:
        ends_s = one.start_s + (1 + margin) * case.items[one.item].pieces_s[one.piece]
        if one.behind + 1 < len(case.step.busy):
            assert ends_s <= case.step.busy[one.behind + 1].start_s + 1e-6


def curvature(name: str, seconds: float) -> WorkItem:
    return WorkItem(name, 0, (seconds,), (0,), "forward")


def test_pieces_fill_gaps_in_the_only_way() -> None:
    """Pieces of 3, 3, 2, 2 and 2 s fill gaps of 6 s in two steps only as 3 + 3 and 2 + 2 + 2."""
    step = DeviceStep((Busy(0, 1, "forward", 0, 0), Busy(7, 8, "backward", 0, 0)), 8)
    items = tuple(curvature(f"{place}", seconds) for place, seconds in enumerate((3, 2, 3, 2, 2)))
    window = solved(Work.of(step, items, 0), 2)
    assert window is not None
    assert violations(step, items, window) == ()
    assert solved(Work.of(step, items, 0), 1) is None


def test_the_margin_is_that_of_the_last_piece() -> None:
    """A gap of 6.2 s holds 5 s, then 1 s with its margin of 0.15 s, but not 3 s twice, with 0.45 s."""
    step = DeviceStep((Busy(0, 1, "forward", 0, 0), Busy(7.2, 8, "backward", 0, 0)), 8)
    assert solved(Work.of(step, (curvature("A", 5), curvature("B", 1)), 0.15), 1) is not None
    assert solved(Work.of(step, (curvature("A", 3), curvature("B", 3)), 0.15), 1) is None


def test_many_pieces_are_refused_in_one_line() -> None:
    step = DeviceStep((Busy(0, 1, "forward", 0, 0), Busy(7, 8, "backward", 0, 0)), 8)
    items = tuple(curvature(f"{place}", 3.2 if place % 2 else 2.9) for place in range(60))
    with pytest.raises(InputError, match=r"exact placement: \d+ choices of gaps are more than \d+"):
        exact(step, items, margin=0)
