"""The published greedy way to place work (PipeFisher, arXiv 2211.14133, section 3.3).

It differs from the published program where that one adds up the wrong micro-batches:

* A piece waits for the pass of its own micro-batch and stage. The published one counts passes of one stage
  of a device. Both are the same where passes come in the order of pieces.
* A window that mixes the work of two windows in one sum does not count as complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.methods.bubble_filling.cyclic import mixed, turns_of
from weft.methods.bubble_filling.gaps import ancestors, gaps_of, in_order, passes_of
from weft.methods.bubble_filling.work import DeviceStep, Placed, Window, WorkItem


def official(
    step: DeviceStep, items: Sequence[WorkItem], *, margin: float = 0.05, most_steps: int = 64
) -> Window:
    """Place work gap by gap, each time the first item of the list that fits; add steps until all fits.

    All work of one kind comes before the work behind it. If an added step completes no item,
    all that is left comes behind it and makes it longer. So does what `most_steps` leaves.

    Args:
        step, items, margin, most_steps: as of a `Placer`; items in the order of their kinds.
    """
    filler = _Filler(step, items, margin)
    filled = _Filled(list(range(len(items))), [0] * len(items))
    steps = 1
    filled.cursors.append(filler.starts())
    filler.fill(filled, 0, captured=False)
    while filled.left:
        # Gaps of earlier steps are as good as new ones: all that is left uses passes of the window before.
        wrapped = filled.copy()
        for one in range(steps):
            filler.fill(wrapped, one, captured=True)
        if not wrapped.left and not mixed(items, turns_of(step, items, wrapped.in_order())):
            return Window(steps, wrapped.in_order())
        before = len(filled.left)
        if steps < most_steps:
            filled.cursors.append(filler.starts())
            filler.fill(filled, steps, captured=True)
            steps += 1
        if len(filled.left) == before:
            added_s = filler.append(filled, steps - 1)
            return Window(steps, filled.in_order(), added_s)
    return Window(steps, filled.in_order())


@dataclass
class _Filled:
    """The contents of the gaps so far.

    Attributes:
        left: places of the items that are left, in the order of the list.
        done: by item, the number of its placed pieces.
        cursors: by step and gap, the time from which the gap is idle.
    """

    left: list[int]
    done: list[int]
    cursors: list[list[float]] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)

    def copy(self) -> _Filled:
        cursors = [list(one) for one in self.cursors]
        return _Filled(list(self.left), list(self.done), cursors, list(self.placed))

    def in_order(self) -> tuple[Placed, ...]:
        return tuple(sorted(self.placed, key=lambda one: (one.step, one.start_s, one.behind)))


class _Filler:
    def __init__(self, step: DeviceStep, items: Sequence[WorkItem], margin: float) -> None:
        self.step, self.items, self.factor = step, items, 1 + margin
        self.gaps, self.passes, self.barriers = gaps_of(step), passes_of(step), _barriers(items)

    def starts(self) -> list[float]:
        return [gap.start_s for gap in self.gaps]

    def fill(self, filled: _Filled, step: int, *, captured: bool) -> None:
        """Place in each gap of a step what fits, going through the list until nothing does.

        `captured` says that all passes have ended.
        """
        left = filled.left
        for number in range(len(self.gaps)):
            before = -1
            while left and len(filled.placed) > before:
                before, place = len(filled.placed), 0
                while place < len(left):
                    item = left[place]
                    self._take(filled, item, step, number, captured)
                    if filled.done[item] == len(self.items[item].pieces_s):
                        # The published loop then skips the next item until it goes through the list again.
                        del left[place]
                    place += 1

    def _take(self, filled: _Filled, item: int, step: int, number: int, captured: bool) -> None:
        """Place as many pieces of an item in a gap as are ready and fit."""
        work, gap, time = self.items[item], self.gaps[number], filled.cursors[step][number]
        if not self.barriers[item].isdisjoint(filled.left):
            return
        while (piece := filled.done[item]) < len(work.pieces_s):
            seconds = work.pieces_s[piece]
            if not time + self.factor * seconds < gap.end_s:
                break
            if work.follows is not None and not captured:
                needed = self.passes[work.follows, work.stage, work.micro_batches[piece]]
                if needed > gap.behind:
                    break
            filled.placed.append(Placed(step, gap.behind, time, item, piece))
            filled.done[item] += 1
            time += seconds
        filled.cursors[step][number] = time

    def append(self, filled: _Filled, step: int) -> float:
        """Place what is left behind a step; return its seconds."""
        behind, time = len(self.step.busy) - 1, self.step.end_s
        for item in (one for one in in_order(self.items) if one in filled.left):
            for piece in range(filled.done[item], len(self.items[item].pieces_s)):
                filled.placed.append(Placed(step, behind, time, item, piece))
                time += self.items[item].pieces_s[piece]
        return time - self.step.end_s


def _barriers(items: Sequence[WorkItem]) -> list[frozenset[int]]:
    """Return, for each item that waits for others, all items of the earlier kinds of the same passes."""
    before = ancestors(items)
    follows = [{items[one].follows for one in (place, *before[place])} for place in range(len(items))]
    depth = [0] * len(items)
    for place in in_order(items):
        depth[place] = 1 + max((depth[one] for one in items[place].after), default=-1)
    return [
        frozenset(
            other
            for other in range(len(items))
            if depth[other] < depth[place] and (follows[other] & follows[place]) - {None}
        )
        | before[place]
        for place in range(len(items))
    ]
