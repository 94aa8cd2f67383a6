"""From a placement to stages: runs of operators on one device that form a graph without cycles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.planning.placement.graph import OperatorGraph
from weft.program.arrays import Ints


def segments(
    graph: OperatorGraph, device: Ints, sequence: Ints, *, at_messages: bool = False
) -> list[tuple[int, list[int]]]:
    """Return segments, each its device and its operators, rising.

    An operator joins the latest segment of its device, unless it reads from a segment that depends on that
    one. Then it begins another. So segments form a graph without cycles, and each is convex. A segment waits
    for all that it reads and sends all at its end.

    Args:
        device: of each operator, shape (operators,).
        sequence: all operators, each behind those that it reads.
        at_messages: True to begin another segment also behind each operator that another device reads, and
            before each that reads another device. Then messages wait for no operator that they do not need.
    """
    found: list[tuple[int, list[int]]] = []
    latest: dict[int, int] = {}
    segment_of = [0] * graph.operators
    # The segments on which each depends, as bits.
    before: list[int] = []
    crosses = _crossing(graph, device) if at_messages else None
    for operator in sequence.tolist():
        place = int(device[operator])
        read = {segment_of[producer] for producer in graph.predecessors[operator]}
        own = latest.get(place)
        ends = (
            crosses is not None
            and own is not None
            and (crosses[found[own][1][-1], 0] or crosses[operator, 1])
        )
        if own is None or ends or any(before[one] >> own & 1 for one in read):
            own = latest[place] = len(found)
            found.append((place, []))
            before.append(0)
        found[own][1].append(operator)
        segment_of[operator] = own
        _depend(before, own, read - {own})
    return [(place, sorted(members)) for place, members in found]


def _crossing(graph: OperatorGraph, device: Ints) -> npt.NDArray[np.bool_]:
    """Return for each operator whether another device reads it, and whether it reads one: (operators, 2)."""
    edges = graph.edges
    apart = edges[device[edges[:, 0]] != device[edges[:, 1]]]
    found = np.zeros((graph.operators, 2), dtype=np.bool_)
    found[apart[:, 0], 0] = True
    found[apart[:, 1], 1] = True
    return found


def _depend(before: list[int], segment: int, read: set[int]) -> None:
    """Let a segment, and all that depend on it, depend on others."""
    added = 0
    for one in read:
        added |= before[one] | 1 << one
    if before[segment] | added != before[segment]:
        for other, known in enumerate(before):
            if other == segment or known >> segment & 1:
                before[other] = known | added
