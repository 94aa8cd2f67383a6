"""The critical path of a timeline: the instructions that a step waits for, and their seconds.

An instruction waits for its inputs, its queue and its host. From the last end, the path goes back to the one
of these that was ready last, and so on. Of equal ones it takes one that is no codec. A collective waits for
the inputs of all its members. Steps repeat, so the path of a predicted timeline closes to a circle. Its
length over its number of cycles is the period of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.program.arrays import Floats, Ints, Mask
from weft.program.checks.messages import collective_codes
from weft.program.kinds import CODEC, KINDS, is_collective, is_compute
from weft.program.program import NONE, Program
from weft.timeline.timeline import Timeline

# The latest cycles of a measured timeline that count.
MOST_CYCLES = 32


class PathPart(NamedTuple):
    """A part of the path: a row of the program in a cycle, and when the path is there."""

    row: int
    cycle: int
    begin_ns: float
    end_ns: float


def critical_path(
    program: Program, timeline: Timeline, *, period_ns: float | None = None, delay_ns: Ints | None = None
) -> Floats:
    """Return the seconds that the critical path of a mean step spends in each row of the program.

    Args:
        timeline: predicted for one cycle, or measured for several.
        period_ns: from a cycle to the next, which is its like; None: the timeline has all cycles.
        delay_ns: by row, the time from its end to the earliest start of the rows that follow by an edge.
    """
    walk = _WayBack(program, timeline, period_ns, delay_ns)
    spent, cycles = np.zeros(len(program)), 0
    if period_ns is None:
        cycles, (begin, end) = walk.whole_cycles
        for part in walk.back():
            spent[part.row] += max(0.0, min(part.end_ns, end) - max(part.begin_ns, begin))
    else:
        circle, cycles = _circle(walk.back())
        for part in circle:
            spent[part.row] += part.end_ns - part.begin_ns
    return spent / (1e9 * max(1, cycles) * program.steps_per_cycle)


def _circle(path: Iterator[PathPart]) -> tuple[list[PathPart], int]:
    """Return the parts from a row to the same row in an earlier cycle, and the number of cycles between."""
    found: list[PathPart] = []
    place: dict[int, int] = {}
    for part in path:
        first = place.setdefault(part.row, len(found))
        if first < len(found):
            return found[first:], found[first].cycle - part.cycle
        found.append(part)
    return found, 1


class _WayBack:
    """The way back through a timeline."""

    def __init__(
        self, program: Program, timeline: Timeline, period_ns: float | None, delay_ns: Ints | None
    ) -> None:
        self._program, self._period_ns = program, period_ns
        self._delay_ns = np.zeros(len(program)) if delay_ns is None else delay_ns
        self._before = _Before(program)
        inside = timeline.take(timeline.step != NONE)
        cycle = inside.step // program.steps_per_cycle
        # Those that are there, as if one followed the other.
        numbers, cycle = np.unique(cycle, return_inverse=True)
        self._cycles = max(1, min(len(numbers), MOST_CYCLES))
        self._times = np.full((2, self._cycles, len(program)), np.nan)
        kept = cycle >= len(numbers) - self._cycles
        at = cycle[kept] - (len(numbers) - self._cycles), inside.position[kept]
        self._times[0][at], self._times[1][at] = inside.start_ns[kept], inside.end_ns[kept]

    @property
    def whole_cycles(self) -> tuple[int, tuple[float, float]]:
        """The number of cycles with their like before and after them, and their begin and end."""
        if np.isnan(self._times).all():
            return 1, (0.0, 0.0)
        begins = np.nanmin(self._times[0], axis=1)
        if self._cycles < 3:
            return self._cycles, (float(begins[0]), float(np.nanmax(self._times[1])))
        return self._cycles - 2, (float(begins[1]), float(begins[-1]))

    def back(self) -> Iterator[PathPart]:
        """Yield the parts of the path, the last one first."""
        last = self._cycles - 1
        if not len(self._program) or np.isnan(self._times[1, last]).all():
            return
        row, cycle = int(np.nanargmax(self._times[1, last])), last
        now = self._end(row, cycle)
        while True:
            begin = min(now, self._start(row, cycle))
            yield PathPart(row, cycle, begin, now)
            found = self._latest(row, cycle)
            if found is None:
                return
            now = min(begin, self._end(*found))
            row, cycle = found

    def _latest(self, row: int, cycle: int) -> tuple[int, int] | None:
        """Return the row, and its cycle, for which a row has waited."""
        begin, found = self._start(row, cycle), []
        for other, distance, edge in self._before.of(row):
            end = self._end(other, cycle - distance)
            ready = end + (self._delay_ns[other] if edge else 0.0)
            # Hosts of accelerators do not wait for computations.
            if not np.isnan(end) and (edge is not None or end <= begin):
                codec = self._before.is_codec[other]
                found.append(((ready, edge is not None, not codec, -other), (other, cycle - distance)))
        return max(found)[1] if found else None

    def _start(self, row: int, cycle: int) -> float:
        return self._time(0, row, cycle)

    def _end(self, row: int, cycle: int) -> float:
        return self._time(1, row, cycle)

    def _time(self, which: int, row: int, cycle: int) -> float:
        if self._period_ns is not None:
            return float(self._times[which, -1, row]) + (cycle - self._cycles + 1) * self._period_ns
        return float(self._times[which, cycle, row]) if 0 <= cycle < self._cycles else np.nan


class _Before:
    """The rows that a row may wait for: inputs, the row before in its queue, and on its host."""

    def __init__(self, program: Program) -> None:
        columns, edges = program.columns, program.edges
        rows, body = np.arange(len(program)), columns.iteration != NONE
        self.is_codec: Mask = np.array([kind.stream == CODEC for kind in KINDS])[columns.kind]
        kept = np.flatnonzero(body[edges.source])
        kept = kept[np.argsort(edges.target[kept], kind="stable")]
        self._source, self._distance = edges.source[kept], edges.distance[kept]
        self._first = np.searchsorted(edges.target[kept], np.arange(len(program) + 1))
        self._in_queue = _former(program.queue, rows[body], len(program))
        computing = rows[body & is_compute(columns.kind)]
        self._on_host = _last_before(columns.rank, computing, len(program))
        collectives = np.flatnonzero(is_collective(columns.kind))
        self._meeting, self._members = np.full(len(program), NONE), dict[int, Ints]()
        if len(collectives):
            _, which = np.unique(collective_codes(program, collectives), return_inverse=True)
            self._meeting[collectives] = which
            order = np.argsort(which, kind="stable")
            parts = np.split(collectives[order], np.cumsum(np.bincount(which))[:-1])
            self._members = dict(enumerate(parts))

    def of(self, row: int) -> Iterator[tuple[int, int, bool | None]]:
        """Yield (row, distance, True for an edge, False for the queue and None for the host)."""
        members = self._members.get(int(self._meeting[row]), (row,))
        for one in map(int, members):
            for place in range(self._first[one], self._first[one + 1]):
                yield int(self._source[place]), int(self._distance[place]), True
            for (before, later), edge in ((self._in_queue, False), (self._on_host, None)):
                if before[one] != NONE:
                    yield int(before[one]), int(later[one]), edge


def _former(key: Ints, rows: Ints, length: int) -> tuple[Ints, Ints]:
    """Return the row before each of `rows` with the same key, and 1 where it is of the cycle before."""
    before, later = np.full(length, NONE), np.zeros(length, dtype=np.int64)
    order = rows[np.argsort(key[rows], kind="stable")]
    if not len(order):
        return before, later
    begins = np.flatnonzero(np.diff(key[order], prepend=key[order[0]] - 1))
    ends = np.append(begins[1:], len(order)) - 1
    before[order[1:]] = order[:-1]
    before[order[begins]], later[order[begins]] = order[ends], 1
    return before, later


def _last_before(rank: Ints, computing: Ints, length: int) -> tuple[Ints, Ints]:
    """Return the computation that the host of each row issues before it, and 1 where it is a cycle before."""
    before, later = np.full(length, NONE), np.zeros(length, dtype=np.int64)
    if not len(computing):
        return before, later
    rows = np.arange(length)
    place = np.searchsorted(computing, rows) - 1
    own = (place >= 0) & (rank[computing[np.maximum(place, 0)]] == rank)
    last = np.full(int(rank.max()) + 1, NONE)
    last[rank[computing]] = computing
    before[:] = np.where(own, computing[np.maximum(place, 0)], last[rank])
    later[:] = ~own
    return before, later
