"""The event engine: one cycle of a Program as arrays, run in plain Python or compiled.

Small programs run `run_cycle` as it stands, because importing a compiler costs more than they do; large ones
run it through numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import numpy as np

from weft.predict import cycle
from weft.program.program import NONE, Ints

# Work above which loading the compiled engine pays for itself: plain Python takes about 0.2 us for each
# instruction and edge and 5 us for each flow, in three cycles or so; the compiled engine takes about 0.4 s to
# load from its cache.
COMPILED_FROM = 600_000
WORK_OF_FLOW = 20


@dataclass(frozen=True, kw_only=True)
class CycleGraph:
    """Dependencies of one cycle.

    Attributes:
        source, target, delay: edges inside the cycle; the target may start `delay` ticks after the source
            has ended.
        occupancy: ticks from start to end, per instruction.
        meeting: number of the collective an instruction takes part in, or -1; its members start together
            when the last one is ready.
        flow_rows, flow_links: flows that can meet others, rising, and their links, shape (flows, 2); see
            `flows_that_meet`. They take their occupancy when alone.
    """

    source: Ints
    target: Ints
    delay: Ints
    occupancy: Ints
    meeting: Ints
    flow_rows: Ints
    flow_links: Ints

    def __len__(self) -> int:
        return len(self.occupancy)

    @cached_property
    def _arrays(self) -> tuple[Ints, ...]:
        """Predecessor counts, successors in rows, members of the meetings in rows, flows."""
        length = len(self)
        order = np.argsort(self.source, kind="stable")
        waiting = np.bincount(self.target, minlength=length)
        first = np.concatenate([[0], np.cumsum(np.bincount(self.source, minlength=length))])
        taking_part = np.flatnonzero(self.meeting >= 0)
        members = taking_part[np.argsort(self.meeting[taking_part], kind="stable")]
        sizes = np.bincount(self.meeting[taking_part], minlength=1)
        first_member = np.concatenate([[0], np.cumsum(sizes)])
        flow_of = np.full(length, NONE)
        flow_of[self.flow_rows] = np.arange(len(self.flow_rows))
        arrays = (waiting, first, self.target[order], self.delay[order], self.occupancy, self.meeting)
        return tuple(
            array.astype(np.int64, copy=False) for array in (*arrays, first_member, members, flow_of)
        )

    def _flows(self) -> cycle.Flows:
        """Flows before the first has been posted."""
        flows, links = len(self.flow_rows), int(self.flow_links.max(initial=NONE)) + 1

        def filled(length: int, value: int) -> Ints:
            return np.full(length, value, dtype=np.int64)

        return cycle.Flows(
            row=self.flow_rows.astype(np.int64),
            link=self.flow_links.ravel().astype(np.int64),
            head=filled(links, NONE),
            following=filled(2 * flows, NONE),
            preceding=filled(2 * flows, NONE),
            remaining=np.zeros(flows),
            since=filled(flows, 0),
            rate=np.zeros(flows),
            version=filled(flows, 0),
            spare=np.zeros(links),
            users=filled(links, NONE),
            fresh=np.zeros(flows),
        )

    @cached_property
    def _lists(self) -> tuple[list[int], ...]:
        return tuple(array.tolist() for array in self._arrays)

    def run(self, release: Ints, compiled: bool | None = None) -> tuple[Ints, Ints, Ints]:
        """Start and end of every instruction, none of which may start before its `release`.

        The third array counts the predecessors that never ended: all zero unless the graph has a cycle.
        `compiled` picks the engine; by default the size of the graph does.
        """
        if compiled is None:
            work = len(self) + len(self.source) + WORK_OF_FLOW * len(self.flow_rows)
            compiled = work >= COMPILED_FROM
        flows = self._flows()
        if compiled:
            waiting, *rest = self._arrays
            arguments = (release, waiting.copy(), *rest, flows, np.zeros_like(release))
            return _compiled_engine()(*arguments)  # type: ignore[no-any-return]
        waiting_list, *lists = self._lists
        engine: Callable[..., Any] = cycle.run_cycle
        flows = cycle.Flows(*(array.tolist() for array in flows))
        answer = engine(release.tolist(), waiting_list.copy(), *lists, flows, [0] * len(release))
        start, end, left = (np.array(values, dtype=np.int64) for values in answer)
        return start, end, left


def flows_that_meet(links: Ints, queue: Ints) -> tuple[Ints, Ints]:
    """Rows of the flows that can meet another one, and their links, numbered densely, shape (flows, 2).

    Args:
        links: shape (rows, 2), the links of each row; -1 where it uses none.
        queue: of each row. Flows of one queue follow each other, so that they never meet.
    """
    rows = np.flatnonzero(links[:, 0] != NONE)
    numbers, dense = np.unique(links[rows], return_inverse=True)
    dense = dense.reshape(-1, 2)
    count = int(queue.max(initial=0)) + 1
    pairs = np.unique(dense.ravel() * count + np.repeat(queue[rows], 2))
    queues = np.bincount(pairs // count, minlength=len(numbers))
    meeting = np.flatnonzero((queues[dense] > 1).any(axis=1))
    return rows[meeting], dense[meeting].astype(np.int64)


@cache
def _compiled_engine() -> Callable[..., Any]:
    import numba

    compiled = numba.njit(cache=True)
    names = {**vars(cycle)}
    # A function finds those it calls among its globals, which come before it.
    for function in cycle.COMPILED:
        names[function.__name__] = compiled(FunctionType(function.__code__, names, function.__name__))
    return names[cycle.run_cycle.__name__]  # type: ignore[no-any-return]
