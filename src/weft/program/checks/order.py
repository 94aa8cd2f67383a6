"""The order of instructions by edges and by queues, which are first in, first out."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.program import Program


class Order:
    """Tests for instructions that wait for others, of many pairs (source, target) at a time."""

    def __init__(self, program: Program) -> None:
        self._program = program
        edges = program.edges.take(program.edges.distance == 0)
        self._edges = np.sort(self._code(edges.source, edges.target))

    def joined(self, source: Ints, target: Ints) -> Mask:
        """Return True where an edge leads from the source to the target."""
        if not len(self._edges):
            return np.zeros(len(source), dtype=np.bool_)
        code = self._code(source, target)
        place = np.minimum(np.searchsorted(self._edges, code), len(self._edges) - 1)
        found: Mask = self._edges[place] == code
        return found

    def ahead(self, source: Ints, target: Ints) -> Mask:
        """Return True where the source is before the target in one queue, or the target's queue awaits it."""
        queue = self._program.queue
        before: Mask = (queue[source] == queue[target]) & (source < target)
        rest = np.flatnonzero(~before)
        before[rest] = self.reaches(source[rest], target[rest])
        return before

    def ahead_of_next_cycle(self, source: Ints, target: Ints) -> Mask:
        """Return True where the target of the next cycle comes after the source of this one."""
        queue = self._program.queue
        before: Mask = queue[source] == queue[target]
        rest = np.flatnonzero(~before)
        source, target = source[rest], target[rest]
        # A row that a queue has waited for in this cycle has ended in the next.
        any_row = np.full(len(target), len(self._program), dtype=np.int64)
        before[rest] = self._waits(source, queue[target], any_row, 0) | self.reaches(source, target, 1)
        return before

    def reaches(self, source: Ints, target: Ints, distance: int = 0) -> Mask:
        """Return True where an edge leads from the source to the target or an earlier row of its queue."""
        return self._waits(source, self._program.queue[target], target, distance)

    def _waits(self, source: Ints, queue: Ints, last: Ints, distance: int) -> Mask:
        """Return True where an edge leads from the source to a row of the queue, at most to `last`."""
        edges, queues = self._program.edges, self._program.queue
        marked = np.zeros(len(self._program), dtype=np.bool_)
        marked[source] = True
        chosen = np.flatnonzero(marked[edges.source] & (edges.distance == distance))
        return _at_most(
            self._code(edges.source[chosen], queues[edges.target[chosen]]),
            edges.target[chosen],
            self._code(source, queue),
            last,
        )

    def spoken_for(self, source: Ints, target: Ints) -> Mask:
        """Return True where an edge leads to the target from the source or a later row of its queue."""
        edges, queues = self._program.edges, self._program.queue
        marked = np.zeros(len(self._program), dtype=np.bool_)
        marked[target] = True
        chosen = np.flatnonzero(marked[edges.target] & (edges.distance == 0))
        return _at_most(
            self._code(edges.target[chosen], queues[edges.source[chosen]]),
            -edges.source[chosen],
            self._code(target, queues[source]),
            -source,
        )

    def _code(self, row: Ints, queue: Ints) -> Ints:
        return row * len(self._program) + queue


def _at_most(known: Ints, values: Ints, wanted: Ints, limit: Ints) -> Mask:
    """Return True for each wanted code with a known value of at most the limit."""
    if not len(known):
        return np.zeros(len(wanted), dtype=np.bool_)
    order = np.lexsort((values, known))
    known, values = known[order], values[order]
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found: Mask = (known[place] == wanted) & (values[place] <= limit)
    return found
