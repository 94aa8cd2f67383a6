"""The gaps of a device's step, and the facts of work items that all ways of placing read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.methods.bubble_filling.work import DeviceStep, PassName, WorkItem


class Bubble(NamedTuple):
    """Idle time of a step: `behind` as in `Placed`, seconds from the begin of the step."""

    behind: int
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def gaps_of(step: DeviceStep) -> tuple[Bubble, ...]:
    """Return the gaps of a step that are longer than 0, in order."""
    starts = (0.0, *(one.end_s for one in step.busy))
    ends = (*(one.start_s for one in step.busy), step.end_s)
    gaps = (Bubble(place - 1, *times) for place, times in enumerate(zip(starts, ends, strict=True)))
    return tuple(gap for gap in gaps if gap.end_s > gap.start_s)


def passes_of(step: DeviceStep) -> Mapping[tuple[PassName, int, int], int]:
    """Return the place in `DeviceStep.busy` that ends each (pass, stage, micro-batch)."""
    return {
        (one.ends, one.stage, one.micro_batch): place
        for place, one in enumerate(step.busy)
        if one.ends is not None
    }


def ready_gaps(step: DeviceStep, items: Sequence[WorkItem], gaps: Sequence[Bubble]) -> list[tuple[int, ...]]:
    """Return, for each piece of each item, the first gap behind the pass that it follows.

    It is the number of gaps for a pass behind which the step has none. It is 0 for items that follow no pass.
    """
    passes, behind = passes_of(step), [gap.behind for gap in gaps]
    first: dict[tuple[PassName, int, int], int] = {}

    def gap_of(key: tuple[PassName, int, int]) -> int:
        if key not in first:
            first[key] = bisect_left(behind, passes[key])
        return first[key]

    return [
        (0,) * len(item.pieces_s)
        if item.follows is None
        else tuple(gap_of((item.follows, item.stage, one)) for one in item.micro_batches)
        for item in items
    ]


def ancestors(items: Sequence[WorkItem]) -> list[frozenset[int]]:
    """Return all items that come before each item, directly or through others."""
    found: dict[int, frozenset[int]] = {}

    def of(place: int) -> frozenset[int]:
        if place not in found:
            direct = items[place].after
            found[place] = frozenset(direct).union(*(of(before) for before in direct))
        return found[place]

    return [of(place) for place in range(len(items))]


def followers(items: Sequence[WorkItem]) -> tuple[tuple[int, ...], ...]:
    """Return the items that come directly behind each item."""
    found: list[list[int]] = [[] for _ in items]
    for place, item in enumerate(items):
        for before in item.after:
            found[before].append(place)
    return tuple(map(tuple, found))


def in_order(items: Sequence[WorkItem]) -> list[int]:
    """Return the places of the items, each behind all that come before it, else as they are listed."""
    before = ancestors(items)
    return sorted(range(len(items)), key=lambda place: (len(before[place]), place))
