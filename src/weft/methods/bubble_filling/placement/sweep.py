"""A sweep over the gaps of a window, forward or backward in time, that fills each with ready pieces.

Gaps are numbered through the window, and on through the first step of the next window. Work may wrap around
into gaps of that step, before the passes that it uses come again. A backward sweep is a forward one in
mirrored time. It begins with the items that have none behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from weft.methods.bubble_filling.gaps import in_order
from weft.methods.bubble_filling.placement.prepared import ROUNDING, Work
from weft.methods.bubble_filling.work import Placed, Window


class _Run(NamedTuple):
    """Pieces of one item, one behind the other in a gap: `pieces` places of its queue from `first`."""

    item: int
    first: int
    pieces: int


class _Segment:
    """The pieces of a gap that use passes of the same window.

    Attributes:
        used_s: their sum.
        needed_s: the length of a gap that holds them with their margins; infinite where they are longer.
        runs: the pieces, in the order in which they were placed.
    """

    __slots__ = ("needed_s", "runs", "used_s")

    def __init__(self) -> None:
        self.used_s, self.needed_s = 0.0, 0.0
        self.runs: list[_Run] = []


_EMPTY = _Segment()


class Sweep:
    """One visit of all gaps of a window and of the first step of the next one.

    Args:
        work: gaps and items.
        steps: the window.
        order: places of the items; the first that is ready and fits is placed first.
        backward: whether time is mirrored.
        spilled: items that may make steps longer; not in mirrored time.
        unwrapped: items that end within the window.
    """

    def __init__(
        self,
        work: Work,
        steps: int,
        order: Sequence[int],
        *,
        backward: bool = False,
        spilled: frozenset[int] = frozenset(),
        unwrapped: frozenset[int] = frozenset(),
    ) -> None:
        self.work, self.steps, self.left, self.backward = work, steps, list(order), backward
        self.spilled, self.unwrapped = spilled, unwrapped
        self.items = work.backward if backward else work.forward
        self.period = steps * len(work.gaps)
        self.visits = self.period + len(work.gaps)
        # By gap: the pieces that use passes of this window; in the first step, of the window before.
        self.now = [_Segment() for _ in range(self.period)]
        self.before = [_Segment() for _ in work.gaps]
        self.next = [0] * len(work.items)
        self.first_visit = [self.visits] * len(work.items)
        self.waits = [len(of) for of in self.items.needs]

    def run(self) -> list[int]:
        """Visit gaps until all is placed; return the items that have pieces left."""
        spare_s = self.steps * self.work.idle_s - self.work.work_s
        for visit in range(self.visits):
            last = self.spilled and visit < self.period and (visit + 1) % len(self.work.gaps) == 0
            if last:
                self._spill(visit, self.work.long, most=1)
            self._fill(visit)
            if last and visit == self.period - 1:
                self._spill(visit, self.spilled, most=len(self.left))
            if not self.left:
                break
            if not self.spilled and len(self.work.gaps) <= visit < self.period:
                # Nothing comes back to this gap.
                spare_s -= self._idle_s(visit)
                if spare_s < -ROUNDING * self.work.idle_s:
                    break
        return self.left

    def _idle_s(self, visit: int) -> float:
        """Return the idle time that is left in a gap behind the first step that was visited."""
        place = self.visits - 1 - visit if self.backward else visit
        return self.work.gaps[place % len(self.work.gaps)].length_s - self.now[place].used_s

    def _fill(self, visit: int) -> None:
        """Fill a gap with what is ready, until no more fits."""
        time = self.visits - 1 - visit if self.backward else visit
        wrapped, place = divmod(time, self.period)
        now, number = self.now[place], place % len(self.work.gaps)
        before = self.before[place] if place == number else _EMPTY
        length_s = self.work.gaps[number].length_s
        # Pieces that use passes of the window before come first in their gap.
        if wrapped:
            mine, most_needed_s, most_used_s = before, length_s, length_s - now.needed_s
        else:
            mine, most_needed_s, most_used_s = now, length_s - before.used_s, length_s
        ended = min(most_needed_s, most_used_s) - mine.used_s >= self.work.smallest_s
        while ended:
            ended = False
            for item in self.left:
                if not self.waits[item] and self._may_begin(item, visit):
                    ended |= self._take(item, visit, mine, most_needed_s, most_used_s)
            if ended:
                self.left = [one for one in self.left if self.next[one] < len(self.items.seconds[one])]

    def _may_begin(self, item: int, visit: int) -> bool:
        """Return whether neither an item nor what it needs begins anew before a gap."""
        if visit < self.period:
            return True
        began = (self.first_visit[one] for one in (item, *self.items.needs[item]))
        return item not in self.unwrapped and min(began) + self.period >= visit

    def _take(self, item: int, visit: int, mine: _Segment, most_needed_s: float, most_used_s: float) -> bool:
        """Place the pieces of an item that are ready and fit; return whether none is left."""
        seconds, ready = self.items.seconds[item], self.items.ready[item]
        # The pass of a piece comes again; work that follows none may end in any gap.
        again = visit if self.work.items[item].follows else 0
        factor, backward, used_s, needed_s = self.work.factor, self.backward, mine.used_s, mine.needed_s
        first = place = self.next[item]
        while place < len(seconds) and ready[place] <= visit and again < ready[place] + self.period:
            one = seconds[place]
            if backward:
                with_one_s = max(factor * one, one + needed_s)
            else:
                with_one_s = max(needed_s, used_s + factor * one)
            if with_one_s > most_needed_s or used_s + one > most_used_s:
                break
            used_s, needed_s = used_s + one, with_one_s
            place += 1
        if place > first:
            mine.used_s, mine.needed_s = used_s, needed_s
            self._add(mine, item, visit, place - first)
        return place > first and place == len(seconds)

    def _add(self, mine: _Segment, item: int, visit: int, count: int) -> None:
        mine.runs.append(_Run(item, self.next[item], count))
        self.next[item] += count
        self.first_visit[item] = min(self.first_visit[item], visit)
        if self.next[item] == len(self.items.seconds[item]):
            for one in self.items.behind[item]:
                self.waits[one] -= 1

    def _spill(self, visit: int, items: frozenset[int], most: int) -> None:
        """Place up to `most` of the ready items in the last gap of a step, whatever its length."""
        mine = self.now[visit]
        for item in in_order(self.work.items):
            rest = self.items.seconds[item][self.next[item] :]
            if item in items and rest and not self.waits[item] and most > 0:
                most -= 1
                mine.used_s, mine.needed_s = mine.used_s + sum(rest), inf
                self._add(mine, item, visit, len(rest))
                self.left.remove(item)

    def window(self) -> Window:
        """Return the window of a sweep that has left nothing."""
        placed: list[Placed] = []
        added_s = 0.0
        for place, now in enumerate(self.now):
            step, number = divmod(place, len(self.work.gaps))
            before, gap = () if step else self._pieces(self.before[number]), self.work.gaps[number]
            time = gap.start_s
            for item, piece in (*before, *self._pieces(now)):
                placed.append(Placed(step, gap.behind, time, item, piece))
                time += self.work.items[item].pieces_s[piece]
            if now.needed_s == inf:
                added_s += max(0.0, time - gap.end_s)
        return Window(self.steps, tuple(placed), added_s)

    def _pieces(self, segment: _Segment) -> Iterator[tuple[int, int]]:
        """Yield (item, piece) of a segment in time."""
        for item, first, count in reversed(segment.runs) if self.backward else segment.runs:
            queue = self.work.queues[item]
            start = len(queue) - first - count if self.backward else first
            for piece in queue[start : start + count]:
                yield item, piece
