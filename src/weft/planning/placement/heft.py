"""HEFT: operators by the length of what follows them, each where it ends first.

Topcuoglu, Hariri and Wu, IEEE TPDS 2002. Memory is added: a device without room for an operator is left out.
"""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np

from weft.planning.placement.board import UNPLACED, Board, Placement
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.verification import scheduled
from weft.program.arrays import Floats


def heterogeneous_earliest_finish(graph: OperatorGraph, devices: Devices) -> Placement:
    """Place operators by HEFT, which fills gaps between placed operators where transfers are parallel.

    Where transfers queue, an operator goes behind all that its device has, as transfers go behind others.

    Raises:
        InputError: when an operator fits on no device that it may have.
    """
    board, ranks = Board(graph, devices), upward_ranks(graph, devices)
    ticks: list[list[int]] = graph.ticks.tolist()
    fills = devices.communication == "parallel"
    gaps = [_Gaps(int(graph.ticks.min(initial=1))) for _ in range(devices.count)]
    for operator in np.lexsort([np.arange(graph.operators), -ranks]).tolist():
        home = board.pinned(operator)
        choices = []
        for device, ready in enumerate(board.ready_everywhere(operator)):
            if home in (UNPLACED, device) and not board.missing_bytes(operator, device):
                took = ticks[operator][device]
                start = gaps[device].first(ready, took) if fills else max(ready, board.free_at[device])
                choices.append((start + took, device, start))
        if not choices:
            raise board.refuse(operator)
        end, device, start = min(choices)
        board.place(operator, device, start)
        gaps[device].take(start, end)
    placed = board.placement()
    if not fills:
        return placed
    return scheduled(graph, devices, placed.device, np.argsort(placed.start, kind="stable"))


def upward_ranks(graph: OperatorGraph, devices: Devices) -> Floats:
    """Return the longest chain from each operator to the end, with mean times and transfers, in ticks."""
    own, sizes = graph.ticks.mean(axis=1), graph.edge_bytes.tolist()
    latency, per_byte = devices.mean_transfer_ticks
    ranks: list[float] = own.tolist()
    pairs = zip(reversed(graph.edges.tolist()), reversed(sizes), strict=True)
    for (producer, reader), size in pairs:
        behind = latency + size * per_byte + ranks[reader]
        ranks[producer] = max(ranks[producer], own[producer] + behind)
    return np.array(ranks)


class _Gaps:
    """Free spans of a device, (start, end) in ticks; those shorter than any operator are left out."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._spans: list[tuple[float, float]] = [(0, np.inf)]

    def first(self, ready: int, took: int) -> int:
        """Return the first tick from `ready` on with so many free ticks behind it."""
        number = max(bisect_right(self._spans, (ready, np.inf)) - 1, 0)
        while max(self._spans[number][0], ready) + took > self._spans[number][1]:
            number += 1
        return max(int(self._spans[number][0]), ready)

    def take(self, start: int, end: int) -> None:
        """Take a span that `first` returned."""
        number = bisect_right(self._spans, (start, np.inf)) - 1
        begin, until = self._spans.pop(number)
        for span in ((begin, start), (end, until)):
            if span[1] - span[0] >= self._least:
                insort(self._spans, span)
