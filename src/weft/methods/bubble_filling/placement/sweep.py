"""A sweep over the gaps of a window, forward or backward in time, that fills each with ready pieces.

Gaps are numbered through the window, and on through the first step of the next window. Work may wrap around
into gaps of that step, before the passes that it uses come again. A backward sweep is a forward one in
mirrored time. It begins with the items that have none behind them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from weft.methods.bubble_filling.gaps import in_order
from weft.methods.bubble_filling.placement.prepared import ROUNDING, Work
from weft.methods.bubble_filling.work import Placed, Window


class _Run(NamedTuple):
    """Pieces of one item, one behind the other in a gap: `pieces` places of its queue from `first`."""

    gap: int
    item: int
    first: int
    pieces: int


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
        # By gap: the sum of its pieces, and the length that holds them with their margins. Gaps of the first
        # step and of the step behind the window are the same: each has pieces that use passes of one window.
        self.used_s, self.needed_s = [0.0] * self.visits, [0.0] * self.visits
        self.runs: list[_Run] = []
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

    def _gap(self, visit: int) -> int:
        return self.visits - 1 - visit if self.backward else visit

    def _idle_s(self, visit: int) -> float:
        """Return the idle time that is left in a gap behind the first step that was visited."""
        gap = self._gap(visit)
        return self.work.gaps[gap % len(self.work.gaps)].length_s - self.used_s[gap]

    def _fill(self, visit: int) -> None:
        """Fill a gap with what is ready, until no more fits."""
        gap = self._gap(visit)
        length_s = self.work.gaps[gap % len(self.work.gaps)].length_s
        most_needed_s = most_used_s = length_s
        # Pieces that use passes of the window before come first in their gap.
        if gap >= self.period:
            most_used_s -= self.needed_s[gap - self.period]
        elif gap < len(self.work.gaps):
            most_needed_s -= self.used_s[gap + self.period]
        ended = min(most_needed_s, most_used_s) - self.used_s[gap] >= self.work.smallest_s
        ready, again = self.items.ready, visit >= self.period
        while ended:
            ended = False
            for item in self.left:
                if self.waits[item] or ready[item][self.next[item]] > visit:
                    continue
                if not again or self._may_begin(item, visit):
                    ended |= self._take(item, visit, gap, most_needed_s, most_used_s)
            if ended:
                self.left = [one for one in self.left if self.next[one] < len(self.items.seconds[one])]

    def _may_begin(self, item: int, visit: int) -> bool:
        """Return whether neither an item nor what it needs begins anew before a gap."""
        began = (self.first_visit[one] for one in (item, *self.items.needs[item]))
        return item not in self.unwrapped and min(began) + self.period >= visit

    def _take(self, item: int, visit: int, gap: int, most_needed_s: float, most_used_s: float) -> bool:
        """Place the pieces of an item that are ready and fit; return whether none is left."""
        seconds, ready = self.items.seconds[item], self.items.ready[item]
        # The pass of a piece comes again; work that follows none may end in any gap.
        again = visit if self.work.items[item].follows else 0
        factor, backward = self.work.factor, self.backward
        used_s, needed_s = self.used_s[gap], self.needed_s[gap]
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
            self.used_s[gap], self.needed_s[gap] = used_s, needed_s
            self._add(item, visit, place - first)
        return place > first and place == len(seconds)

    def _add(self, item: int, visit: int, pieces: int) -> None:
        self.runs.append(_Run(self._gap(visit), item, self.next[item], pieces))
        self.next[item] += pieces
        self.first_visit[item] = min(self.first_visit[item], visit)
        if self.next[item] == len(self.items.seconds[item]):
            for one in self.items.behind[item]:
                self.waits[one] -= 1

    def _spill(self, visit: int, items: frozenset[int], most: int) -> None:
        """Place up to `most` of the ready items in the last gap of a step, whatever its length."""
        for item in in_order(self.work.items):
            rest = self.items.seconds[item][self.next[item] :]
            if item in items and rest and not self.waits[item] and most > 0:
                most -= 1
                self.used_s[visit], self.needed_s[visit] = self.used_s[visit] + sum(rest), inf
                self._add(item, visit, len(rest))
                self.left.remove(item)

    def window(self) -> Window:
        """Return the window of a sweep that has left nothing."""
        runs: dict[int, list[_Run]] = defaultdict(list)
        for run in reversed(self.runs) if self.backward else self.runs:
            runs[run.gap].append(run)
        placed: list[Placed] = []
        added_s = 0.0
        for place in range(self.period):
            step, number = divmod(place, len(self.work.gaps))
            gap = self.work.gaps[number]
            time = gap.start_s
            before = runs[place + self.period] if step == 0 else []
            for run in (*before, *runs[place]):
                seconds = self.work.items[run.item].pieces_s
                for piece in self._pieces(run):
                    placed.append(Placed(step, gap.behind, time, run.item, piece))
                    time += seconds[piece]
            if self.needed_s[place] == inf:
                added_s += max(0.0, time - gap.end_s)
        return Window(self.steps, tuple(placed), added_s)

    def _pieces(self, run: _Run) -> tuple[int, ...]:
        """Return the pieces of a run in time."""
        queue = self.work.queues[run.item]
        first = len(queue) - run.first - run.pieces if self.backward else run.first
        return queue[first : first + run.pieces]
