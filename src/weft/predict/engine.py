"""The event engine: one cycle of a Program, as a worklist over its dependency graph.

Without contention every start is a maximum over ends that come before it, so any topological order gives the
same times and no heap is needed. `run_cycle` is the only place where an instruction starts and ends; shared
links will be served there. It is written for plain lists and for compiled arrays alike: small programs run
it as it stands, because importing a compiler costs more than they do, large ones run it through numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from weft.program.program import Ints

# Instructions plus edges above which loading the compiled engine pays for itself (measured: plain Python
# takes about 0.5 us for each, the compiled engine about 0.7 s to load from its cache).
COMPILED_FROM = 600_000


@dataclass(frozen=True, kw_only=True)
class CycleGraph:
    """Dependencies of one cycle.

    Attributes:
        source, target, delay: edges inside the cycle; the target may start `delay` ticks after the source
            has ended.
        occupancy: ticks from start to end, per instruction.
        meeting: number of the collective an instruction takes part in, or -1; its members start together
            when the last one is ready.
    """

    source: Ints
    target: Ints
    delay: Ints
    occupancy: Ints
    meeting: Ints

    def __len__(self) -> int:
        return len(self.occupancy)

    @cached_property
    def _arrays(self) -> tuple[Ints, ...]:
        """Predecessor counts, successors in rows, members of the meetings in rows."""
        length = len(self)
        order = np.argsort(self.source, kind="stable")
        waiting = np.bincount(self.target, minlength=length)
        first = np.concatenate([[0], np.cumsum(np.bincount(self.source, minlength=length))])
        taking_part = np.flatnonzero(self.meeting >= 0)
        members = taking_part[np.argsort(self.meeting[taking_part], kind="stable")]
        sizes = np.bincount(self.meeting[taking_part], minlength=1)
        first_member = np.concatenate([[0], np.cumsum(sizes)])
        arrays = (waiting, first, self.target[order], self.delay[order], self.occupancy, self.meeting)
        return tuple(array.astype(np.int64) for array in (*arrays, first_member, members))

    @cached_property
    def _lists(self) -> tuple[list[int], ...]:
        return tuple(array.tolist() for array in self._arrays)

    def run(self, release: Ints, compiled: bool | None = None) -> tuple[Ints, Ints, Ints]:
        """Start and end of every instruction, none of which may start before its `release`.

        The third array counts the predecessors that never ended: all zero unless the graph has a cycle.
        `compiled` picks the engine; by default the size of the graph does.
        """
        if compiled is None:
            compiled = len(self) + len(self.source) >= COMPILED_FROM
        if compiled:
            waiting, *rest = self._arrays
            return _compiled_engine()(release, waiting.copy(), *rest, np.zeros_like(release))  # type: ignore[no-any-return]
        waiting_list, *lists = self._lists
        engine: Callable[..., Any] = run_cycle
        answer = engine(release.tolist(), waiting_list.copy(), *lists, [0] * len(release))
        start, end, left = (np.array(values, dtype=np.int64) for values in answer)
        return start, end, left


# `Any`: lists in plain Python, int64 arrays under numba.
def run_cycle(
    start: Any,
    waiting: Any,
    first_successor: Any,
    successor: Any,
    delay: Any,
    occupancy: Any,
    meeting: Any,
    first_member: Any,
    members: Any,
    end: Any,
) -> tuple[Any, Any, Any]:
    """Kahn's worklist. `start` holds the release times, `end` zeros; both are filled in.

    What is left in `waiting` belongs to instructions that never started; a collective some of whose members
    never came leaves 1 at the members that did.
    """
    length = len(start)
    worklist = [node for node in range(length) if waiting[node] == 0]
    missing = [first_member[m + 1] - first_member[m] for m in range(len(first_member) - 1)]
    together = [0 for _ in missing]
    for member in members:
        # Until its collective starts, a member counts as waiting for it.
        waiting[member] += 1
    while len(worklist) > 0:
        node = worklist.pop()
        low, high = 0, 1
        room = meeting[node]
        if room >= 0:
            missing[room] -= 1
            together[room] = max(together[room], start[node])
            if missing[room] > 0:
                continue
            low, high = first_member[room], first_member[room + 1]
        for index in range(low, high):
            starting = node
            if room >= 0:
                starting = members[index]
                start[starting] = together[room]
                waiting[starting] = 0
            ended = start[starting] + occupancy[starting]
            end[starting] = ended
            for edge in range(first_successor[starting], first_successor[starting + 1]):
                follower = successor[edge]
                if ended + delay[edge] > start[follower]:
                    start[follower] = ended + delay[edge]
                waiting[follower] -= 1
                if waiting[follower] == (1 if meeting[follower] >= 0 else 0):
                    worklist.append(follower)
    return start, end, waiting


@cache
def _compiled_engine() -> Callable[..., Any]:
    import numba

    return numba.njit(cache=True)(run_cycle)  # type: ignore[no-any-return]
