"""Proof that a window does all work once, in order, without moving a computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from weft.errors import Violation
from weft.methods.bubble_filling.cyclic import mixed, turns_of
from weft.methods.bubble_filling.work import DeviceStep, Placed, Window, WorkItem

# The share of a step by which times may differ from sums in another order.
ROUNDING = 1e-9


def violations(step: DeviceStep, items: Sequence[WorkItem], window: Window) -> tuple[Violation, ...]:
    """Return what is wrong with a window; nothing for a window that may be executed.

    A piece comes behind its pass of the first step, or in that step before it. It then uses the pass of the
    window before. The order of pieces, and that of items behind others, counts from the pass. No sum or
    result begins anew before the last piece that needs it.
    """
    found = [*uncounted(items, window)]
    if not found:
        found += [*_overlaps(step, items, window), *disorder(step, items, window)]
    return tuple(found)


def uncounted(items: Sequence[WorkItem], window: Window) -> Iterator[Violation]:
    """Yield pieces that are not placed exactly once, or in steps that the window does not have."""
    counts = Counter((one.item, one.piece) for one in window.placed)
    owed = {(item, piece) for item, work in enumerate(items) for piece in range(len(work.pieces_s))}
    for item, piece in sorted(owed | set(counts)):
        if (item, piece) not in owed:
            yield Violation("window", f"item {item} has no piece {piece}")
        elif counts[item, piece] != 1:
            yield Violation(
                items[item].name, f"piece {piece} is placed {counts[item, piece]} times, not once"
            )
    for one in window.placed:
        if not 0 <= one.step < window.steps:
            yield Violation(_name(items, one), f"step {one.step} is not one of {window.steps} steps")
    for before, one in pairwise(window.placed):
        if (before.step, before.start_s) > (one.step, one.start_s):
            yield Violation(_name(items, one), f"comes earlier than {_name(items, before)}, but behind it")


def _overlaps(step: DeviceStep, items: Sequence[WorkItem], window: Window) -> Iterator[Violation]:
    """Yield pieces outside their gaps, pieces that overlap, and steps that grow by more than they state."""
    rounding, last = ROUNDING * step.end_s, len(step.busy) - 1
    cursor, previous, over_s = 0.0, -1, 0.0
    for one in window.placed:
        seconds = items[one.item].pieces_s[one.piece]
        if one.step != previous:
            cursor, previous = 0.0, one.step
        gap_start = step.busy[one.behind].end_s if one.behind >= 0 else 0.0
        if one.start_s < max(cursor, gap_start) - rounding:
            yield Violation(_name(items, one), f"starts at {one.start_s} s, before its gap is idle")
        cursor = one.start_s + seconds
        if one.behind < last and cursor > step.busy[one.behind + 1].start_s + rounding:
            yield Violation(_name(items, one), f"ends at {cursor} s, after the next computation should start")
    for number in {one.step for one in window.placed}:
        mine = (one for one in window.placed if one.step == number)
        end_s = max(one.start_s + items[one.item].pieces_s[one.piece] for one in mine)
        over_s += max(0.0, end_s - step.end_s)
    if over_s > window.added_s + rounding * window.steps:
        yield Violation("window", f"steps grow by {over_s} s, but it states {window.added_s} s")


def disorder(step: DeviceStep, items: Sequence[WorkItem], window: Window) -> Iterator[Violation]:
    """Yield items that come before those that they follow, and sums of two windows."""
    turns = turns_of(step, items, window.placed)
    for item, work in enumerate(items):
        for before in work.after:
            if max(turns[before]) > min(turns[item]):
                yield Violation(work.name, f"a piece comes before the last of {items[before].name}")
    for item in mixed(items, turns):
        yield Violation(items[item].name, "begins again before all that needs it has ended")


def _name(items: Sequence[WorkItem], one: Placed) -> str:
    return f"{items[one.item].name}, piece {one.piece}"
