"""From a placement to stages: runs of operators on one device that form a graph without cycles."""

from __future__ import annotations

from weft.planning.placement.graph import OperatorGraph
from weft.program.arrays import Ints


def segments(graph: OperatorGraph, device: Ints, sequence: Ints) -> list[tuple[int, list[int]]]:
    """Return segments, each its device and its operators, rising.

    An operator joins the latest segment of its device, unless it reads from a segment that depends on that
    one. Then it begins another. So segments form a graph without cycles, and each is convex.

    Args:
        device: of each operator, shape (operators,).
        sequence: all operators, each behind those that it reads.
    """
    found: list[tuple[int, list[int]]] = []
    latest: dict[int, int] = {}
    segment_of = [0] * graph.operators
    # The segments on which each depends, as bits.
    before: list[int] = []
    for operator in sequence.tolist():
        place = int(device[operator])
        read = {segment_of[producer] for producer in graph.predecessors[operator]}
        own = latest.get(place)
        if own is None or any(before[one] >> own & 1 for one in read):
            own = latest[place] = len(found)
            found.append((place, []))
            before.append(0)
        found[own][1].append(operator)
        segment_of[operator] = own
        _depend(before, own, read - {own})
    return [(place, sorted(members)) for place, members in found]


def _depend(before: list[int], segment: int, read: set[int]) -> None:
    """Let a segment, and all that depend on it, depend on others."""
    added = 0
    for one in read:
        added |= before[one] | 1 << one
    if before[segment] | added != before[segment]:
        for other, known in enumerate(before):
            if other == segment or known >> segment & 1:
                before[other] = known | added
