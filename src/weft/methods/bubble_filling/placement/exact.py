"""The fewest steps in which all work fits, as a mixed-integer program that HiGHS solves.

Its columns say how many pieces of a lot a gap holds. Gaps count on through the first step of the next window.
Sums over gaps state the order. The program relaxes the rule that each piece keeps its margin: it knows only
the last piece of a gap. If the pieces of a gap have no order that keeps the rule, it excludes this content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from weft.errors import InputError, Violation
from weft.methods.bubble_filling.gaps import ancestors
from weft.methods.bubble_filling.placement.greedy import greedy
from weft.methods.bubble_filling.placement.prepared import ROUNDING, Work
from weft.methods.bubble_filling.work import DeviceStep, Placed, Window, WorkItem
from weft.solver import silent_solver

# A piece of an item, and a gap of the window or of the step behind it.
Piece = tuple[int, int]
Choice = tuple[Piece, int]

# Columns up to which a program is solved, branches of one program, and answers without an order.
MOST_COLUMNS = 1500
MOST_NODES = 1000
MOST_ROUNDS = 50


def exact(
    step: DeviceStep, items: Sequence[WorkItem], *, margin: float = 0.05, most_steps: int = 64
) -> Window:
    """Place work in the fewest steps that do not grow.

    If an item is longer than every gap, or `most_steps` are too few, the window is that of `greedy`.

    Args:
        step, items, margin, most_steps: as of a `Placer`.

    Raises:
        InputError: if there are too many pieces and gaps, or the solver does not end.
    """
    found = greedy(step, items, margin=margin, most_steps=most_steps)
    work = Work.of(step, items, margin)
    if work.long:
        return found
    for steps in range(work.least_steps(), found.steps if found.added_s == 0 else most_steps + 1):
        window = solved(work, steps)
        if window is not None:
            return window
    return found


def solved(work: Work, steps: int) -> Window | None:
    """Return a window of so many steps, none of which grows; None if there is none.

    Raises:
        InputError: as of `exact`.
    """
    return _Program(work, steps).window()


@dataclass(frozen=True, eq=False)
class _Lot:
    """Equal pieces of an item, of which any may come before the others.

    Attributes:
        item: its place in the list.
        pieces: in the order of their passes.
        seconds: of each.
        first: by piece, the first gap that it may take.
        until: by piece, the first gap that it may not take any more.
        columns: by gap, the column with the number of pieces there.
        begun: by gap, the column that is 1 if a piece takes it or an earlier one.
    """

    item: int
    pieces: tuple[int, ...]
    seconds: float
    first: tuple[int, ...]
    until: tuple[int, ...]
    columns: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)


class _Row(NamedTuple):
    """A sum of columns times factors, and the most and the least that it may be."""

    terms: Mapping[int, float]
    most: float
    least: float = -np.inf


class _Program:
    """The mixed-integer program of one window.

    Attributes:
        most: by column, its largest value; its least is 0.
        last: by item and gap of the window, the choice of a piece of that item as the last one there.
    """

    def __init__(self, work: Work, steps: int) -> None:
        self.work, self.steps, self.items = work, steps, work.items
        self.period, self.visits = steps * len(work.gaps), (steps + 1) * len(work.gaps)
        self.before, self.most = ancestors(self.items), list[int]()
        self.last: dict[tuple[int, int], int] = {}
        self.lots = [list(self._lots_of(item)) for item in range(len(self.items))]
        if len(self.most) > MOST_COLUMNS:
            problem = f"{len(self.most)} choices of gaps are more than {MOST_COLUMNS}"
            raise InputError(Violation("exact placement", problem))
        self.rows = [
            row
            for rows in (self._counts(), self._lengths(), self._orders(), self._windows(), self._twins())
            for row in rows
        ]

    def _column(self, most: int) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def _lots_of(self, item: int) -> Iterator[_Lot]:
        """Yield the lots of an item; of pieces in a fixed order, those that follow each other."""
        work, queue, ready = self.items[item], self.work.queues[item], self.work.forward.ready[item]
        places = list(range(len(queue)))
        if work.micro_batches:
            places.sort(key=lambda place: work.pieces_s[queue[place]])
        for seconds, grouped in groupby(places, key=lambda place: work.pieces_s[queue[place]]):
            mine = tuple(grouped)
            first = tuple(ready[place] for place in mine)
            until = tuple(self.visits if work.follows is None else one + self.period for one in first)
            lot = _Lot(item, tuple(queue[place] for place in mine), seconds, first, until)
            for gap in range(first[0], until[-1]):
                if self.work.factor * seconds <= self._length_s(gap):
                    lot.columns[gap] = self._column(len(mine))
                lot.begun[gap] = self._column(1)
            yield lot

    def _length_s(self, gap: int) -> float:
        return self.work.gaps[gap % len(self.work.gaps)].length_s

    def _all(self) -> Iterator[_Lot]:
        return (lot for lots in self.lots for lot in lots)

    def _counts(self) -> Iterator[_Row]:
        """Yield: all pieces are placed, none before its pass or after the next one; what `begun` says."""
        for lot in self._all():
            size = len(lot.pieces)
            yield _Row(dict.fromkeys(lot.columns.values(), 1.0), size, size)
            for gap in lot.begun:
                placed = dict.fromkeys(_until(lot.columns, gap), 1.0)
                may = sum(first <= gap for first in lot.first)
                yield _Row(placed, may, sum(until <= gap + 1 for until in lot.until))
                yield _Row({**placed, lot.begun[gap]: -float(size)}, 0.0)

    def _lengths(self) -> Iterator[_Row]:
        """Yield: the pieces in a gap fit, with the margin of the last one, which no other needs."""
        held: dict[int, list[tuple[_Lot, int]]] = defaultdict(list)
        for lot in self._all():
            for gap in lot.columns:
                held[gap % self.period].append((lot, gap))
        for place, choices in sorted(held.items()):
            own: dict[int, dict[int, float]] = defaultdict(dict)
            seconds: dict[int, float] = {}
            for lot, gap in choices:
                own[lot.item][lot.columns[gap]] = -1.0
                seconds[lot.columns[gap]] = lot.seconds
            for item, terms in own.items():
                last = self.last[item, place] = self._column(1)
                seconds[last] = (self.work.factor - 1) * min(self.items[item].pieces_s)
                yield _Row({last: 1.0, **terms}, 0.0)
            # The solver's tolerance is absolute, so lengths are shares of the gap.
            length_s = self._length_s(place) or 1.0
            yield _Row({column: one / length_s for column, one in seconds.items()}, 1.0)
            for lot, gap in choices:
                size = float(len(lot.pieces))
                lasts = {self.last[item, place]: -size for item in own}
                yield _Row({lot.columns[gap]: 1.0, **lasts}, 0.0)
                # In the step behind the window, a piece may come before those of the next window.
                for before in self.before[lot.item] if gap < self.period else ():
                    if before in own:
                        yield _Row({lot.columns[gap]: 1.0, self.last[before, place]: size}, size)

    def _orders(self) -> Iterator[_Row]:
        """Yield: no piece takes a gap before those that it comes behind."""
        for item, lots in enumerate(self.lots):
            pairs = [
                (first, lot)
                for before in self.items[item].after
                for first in self.lots[before]
                for lot in lots
            ]
            if not self.items[item].micro_batches:
                pairs += pairwise(lots)
            for first, lot in pairs:
                for gap, begun in lot.begun.items():
                    placed = dict.fromkeys(_until(first.columns, gap), -1.0)
                    yield _Row({begun: float(len(first.pieces)), **placed}, 0.0)

    def _windows(self) -> Iterator[_Row]:
        """Yield: an item begins again behind its pieces of before, and those that come behind it."""
        for item, lots in enumerate(self.lots):
            kin = [lot for one in (item, *self.work.forward.behind[item]) for lot in self.lots[one]]
            for again in lots:
                for lot in kin:
                    for gap, begun in again.begun.items():
                        late = [column for at, column in lot.columns.items() if at > gap + self.period]
                        if late:
                            size = float(len(lot.pieces))
                            yield _Row({**dict.fromkeys(late, 1.0), begun: size}, size)

    def _twins(self) -> Iterator[_Row]:
        """Yield: of equal chains of items, the one that is listed first ends first."""
        behind = self.work.forward.behind
        equal: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for item, work in enumerate(self.items):
            chain = sorted((*self.before[item], item), key=lambda one: len(self.before[one]))
            if not behind[item] and all(len(behind[one]) == 1 for one in chain[:-1]):
                facts = tuple((self.items[one].follows, self.items[one].pieces_s) for one in chain)
                equal[work.stage, facts].append(item)
        for items in equal.values():
            for first, item in pairwise(items):
                for gap, begun in self.lots[item][-1].begun.items():
                    yield _Row({begun: 1.0, self.lots[first][-1].begun[gap]: -1.0}, 0.0)

    def window(self) -> Window | None:
        """Return a window of these steps; None if there is none."""
        for _ in range(MOST_ROUNDS):
            values = self._solve()
            if values is None:
                return None
            ordered = {place: self._ordered(content) for place, content in self._contents(values).items()}
            wrong = [place for place, content in ordered.items() if not self._keeps_margins(place, content)]
            if not wrong:
                return self._placed(ordered)
            self.rows += [row for place in wrong for row in self._other_content(place, values)]
        raise InputError(Violation("exact placement", f"no order of pieces in {MOST_ROUNDS} answers"))

    def _solve(self) -> Sequence[int] | None:
        """Return the value of each column; None if the program has no answer."""
        # The solver is loaded only where it is asked for.
        import highspy

        solver, size = silent_solver(), len(self.most)
        solver.setOptionValue("mip_max_nodes", MOST_NODES)
        solver.addVars(size, np.zeros(size), np.array(self.most, dtype=np.float64))
        whole = np.full(size, highspy.HighsVarType.kInteger)
        solver.changeColsIntegrality(size, np.arange(size, dtype=np.int32), whole)
        lengths = np.cumsum([0, *(len(row.terms) for row in self.rows)])
        solver.addRows(
            len(self.rows),
            np.array([row.least for row in self.rows]),
            np.array([row.most for row in self.rows]),
            int(lengths[-1]),
            lengths[:-1].astype(np.int32),
            np.array([one for row in self.rows for one in row.terms], dtype=np.int32),
            np.array([one for row in self.rows for one in row.terms.values()]),
        )
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise InputError(Violation("exact placement", f"not solved in {MOST_NODES} branches"))
        return [round(value) for value in solver.getSolution().col_value]

    def _contents(self, values: Sequence[int]) -> Mapping[int, Sequence[Choice]]:
        """Return the pieces of each gap of the window; pieces of a lot in the order of their passes."""
        contents: dict[int, list[Choice]] = defaultdict(list)
        for lot in self._all():
            pieces = iter(lot.pieces)
            for gap, column in lot.columns.items():
                for _ in range(values[column]):
                    contents[gap % self.period].append(((lot.item, next(pieces)), gap))
        return contents

    def _other_content(self, place: int, values: Sequence[int]) -> Iterator[_Row]:
        """Yield: a gap holds fewer pieces of a lot than it does now."""
        held = {
            lot.columns[gap]: values[lot.columns[gap]]
            for lot in self._all()
            for gap in lot.columns
            if gap % self.period == place and values[lot.columns[gap]]
        }
        fewer = {column: self._column(1) for column in held}
        yield _Row(dict.fromkeys(fewer.values(), 1.0), float(len(fewer)), 1.0)
        for column, one in fewer.items():
            most = self.most[column]
            yield _Row({column: 1.0, one: float(most - held[column] + 1)}, float(most))

    def _seconds(self, piece: Piece) -> float:
        return self.items[piece[0]].pieces_s[piece[1]]

    def _ordered(self, content: Sequence[Choice]) -> list[Piece]:
        """Return the pieces of a gap in the order that needs the shortest gap.

        From the end, it takes the shortest piece that no other needs (Lawler, Management Science 19, 1973).
        """
        left = dict(content)
        ordered: list[Piece] = []
        while left:
            free = (piece for piece in left if not any(self._comes_first(piece, one, left) for one in left))
            last = min(free, key=lambda piece: (self._seconds(piece), piece))
            ordered.append(last)
            del left[last]
        return ordered[::-1]

    def _comes_first(self, one: Piece, piece: Piece, gap: Mapping[Piece, int]) -> bool:
        if gap[one] != gap[piece]:
            return gap[one] > gap[piece]
        if one[0] == piece[0]:
            return one[1] < piece[1] and not self.items[one[0]].micro_batches
        return one[0] in self.before[piece[0]]

    def _keeps_margins(self, place: int, content: Sequence[Piece]) -> bool:
        used_s, length_s = 0.0, self._length_s(place)
        for piece in content:
            if used_s + self.work.factor * self._seconds(piece) > length_s + ROUNDING * self.work.idle_s:
                return False
            used_s += self._seconds(piece)
        return True

    def _placed(self, ordered: Mapping[int, Sequence[Piece]]) -> Window:
        placed = []
        for place, content in sorted(ordered.items()):
            step, number = divmod(place, len(self.work.gaps))
            time = self.work.gaps[number].start_s
            for item, piece in content:
                placed.append(Placed(step, self.work.gaps[number].behind, time, item, piece))
                time += self.items[item].pieces_s[piece]
        return Window(self.steps, tuple(placed))


def _until(columns: Mapping[int, int], gap: int) -> Iterator[int]:
    return (column for at, column in columns.items() if at <= gap)
