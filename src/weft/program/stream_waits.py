"""The waits between the streams of a rank that order its instructions, without those that others imply.

A stream runs its rows in order. Rows of messages and collectives also follow all computations that the host
issued before them. The memory that the host gives them may have been theirs. So a device needs few of the
edges inside a rank as waits. They are a transitive reduction, which is unique in a graph without cycles. The
source is Aho, Garey and Ullman, The transitive reduction of a directed graph, 1972.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.codes import distinct_rows
from weft.program.kinds import KINDS, is_collective, is_compute
from weft.program.program import NONE, Columns, Edges
from weft.program.rank_program import RankProgram

# A step begins when all work has ended but that of the step before.
STEPS_BACK = 1


def stream_waits(part: RankProgram) -> Edges:
    """Return the edges between streams of a rank for which a device has to wait, by rows of the part.

    With the order of streams they give every order within two steps that all edges inside the rank give.
    Each of them is needed for that.
    """
    rows, stream = len(part), stream_of(part.columns)
    edges = edges_between(part, stream)
    # An edge may be implied from the cycle before: the last of as many cycles has all its edges.
    cycles = 1 + int(edges.distance.max(initial=0))
    unrolled = Edges.join(
        [
            Edges.of(one.source + rows * (cycle - one.distance), one.target + rows * cycle, one.distance)
            for cycle in range(cycles)
            for one in [edges.take(edges.distance <= cycle)]
        ]
    )
    computes = np.tile(is_compute(part.columns.kind), cycles)
    kept = unrolled.take(_needed(np.tile(stream, cycles), computes, unrolled))
    kept = kept.take(kept.target >= rows * (cycles - 1))
    return Edges(source=kept.source % rows, target=kept.target % rows, distance=kept.distance)


def stream_of(columns: Columns) -> Ints:
    """Return the number of each row's stream: one for each kind of stream and, for messages, each peer."""
    names = {name: number for number, name in enumerate(dict.fromkeys(kind.stream for kind in KINDS))}
    named = np.array([names[kind.stream] for kind in KINDS], dtype=np.int64)[columns.kind]
    alone = is_collective(columns.kind) | is_compute(columns.kind)
    return distinct_rows(named, np.where(alone, NONE, columns.peer))[1]


def edges_between(part: RankProgram, stream: Ints) -> Edges:
    """Return the edges between streams of the rank that end at most a step later, by rows of the part."""
    edges, rows, step = part.edges, range(len(part)), part.columns.iteration
    source, target = edges.source - part.first_row, edges.target - part.first_row
    own = np.flatnonzero((source >= 0) & (source < len(rows)) & (target >= 0) & (target < len(rows)))
    source, target, distance = source[own], target[own], edges.distance[own]
    later = step[target] + distance * part.steps_per_cycle - step[source]
    crosses = (stream[source] != stream[target]) & (later <= STEPS_BACK)
    return Edges(source=source[crosses], target=target[crosses], distance=distance[crosses])


def _needed(stream: Ints, computes: Mask, edges: Edges) -> Ints:
    """Return the numbers of the edges that no others imply, by target.

    By row, the last row of each stream that it follows is a vector clock. Rows are in order of issue.
    """
    streams = int(stream.max(initial=NONE)) + 1
    reached = [[NONE] * streams for _ in range(streams)]
    # Of the computations' own stream, and its place in clocks.
    place = int(stream[computes][0]) if computes.any() else NONE
    at_source: dict[int, tuple[int, ...]] = dict.fromkeys(edges.source.tolist(), ())
    # The latest sources first: an edge may be implied by a later one, but not the other way round.
    order = np.lexsort((-edges.source, edges.target))
    numbers = zip(*(one.tolist() for one in (edges.target[order], edges.source[order], order)), strict=True)
    following, found = next(numbers, None), list[int]()
    for row, (own, is_computation) in enumerate(zip(stream.tolist(), computes.tolist(), strict=True)):
        clock = reached[own]
        if not is_computation and place != NONE and clock[place] < reached[place][place]:
            _reach(clock, reached[place])
        while following is not None and following[0] == row:
            _, source, edge = following
            if clock[int(stream[source])] < source:
                found.append(edge)
                _reach(clock, at_source[source])
            following = next(numbers, None)
        clock[own] = row
        if row in at_source:
            at_source[row] = tuple(clock)
    return np.array(found, dtype=np.int64)


def _reach(clock: list[int], other: Iterable[int]) -> None:
    clock[:] = map(max, clock, other)
