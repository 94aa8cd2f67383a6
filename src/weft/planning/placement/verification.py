"""`check_placement`, which finds what is wrong with a placement, and `replayed`, which times it anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from weft.describe.units import format_bytes
from weft.errors import Violation
from weft.planning.placement.board import Board, Placement
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.program.arrays import Ints


def scheduled(graph: OperatorGraph, devices: Devices, device: Ints, sequence: Ints) -> Placement:
    """Return the placement in which each operator starts as early as its place in a sequence allows.

    Args:
        device: of each operator, shape (operators,).
        sequence: all operators, each behind those that it reads, shape (operators,).
    """
    board, places = Board(graph, devices), device.tolist()
    for operator in sequence.tolist():
        board.place(operator, places[operator])
    return board.placement()


def replayed(graph: OperatorGraph, devices: Devices, placement: Placement) -> Placement:
    """Return a placement with times that follow from its devices and its sequence alone."""
    return scheduled(graph, devices, placement.device, placement.sequence)


def check_placement(graph: OperatorGraph, devices: Devices, placement: Placement) -> list[Violation]:
    """Return what is wrong with a placement: nothing for one that can run as it says.

    Nothing of the scheduler is used, so that its mistakes show.
    """
    count = graph.operators
    shapes = {len(placement.device), len(placement.start), len(placement.end)}
    whole = np.array_equal(np.sort(placement.sequence), np.arange(count))
    if shapes != {count} or not whole:
        return [Violation("placement", f"does not name each of {count} operators once")]
    outside = np.flatnonzero((placement.device < 0) | (placement.device >= devices.count))
    if len(outside):
        name = graph.names[int(outside[0])]
        return [Violation("placement", f"operator {name!r} is on none of {devices.count} devices")]
    arrivals = {(one.tensor, one.target): one.end for one in placement.transfers}
    return [
        *_computations(graph, devices, placement),
        *_transfers(graph, devices, placement),
        *_reads(graph, placement, arrivals),
        *_memory(graph, devices, placement, arrivals),
    ]


def _computations(graph: OperatorGraph, devices: Devices, placement: Placement) -> Iterator[Violation]:
    """Yield wrong times of operators, operators side by side on a device, and groups apart."""
    own = graph.ticks[np.arange(graph.operators), placement.device]
    wrong = np.flatnonzero((placement.start < 0) | (placement.end - placement.start != own))
    for operator in wrong.tolist():
        yield Violation(
            "placement", f"operator {graph.names[operator]!r} does not take {own[operator]} ticks"
        )
    for device in range(devices.count):
        for before, after in pairwise(placement.order(device).tolist()):
            if placement.start[after] < placement.end[before]:
                names = f"{graph.names[after]!r} starts before {graph.names[before]!r} ends"
                yield Violation("placement", f"{names}, both on device {device}")
    homes = defaultdict[int, set[int]](set)
    for group, home in zip(graph.groups.tolist(), placement.device.tolist(), strict=True):
        homes[group].add(home)
    for group, found in homes.items():
        if len(found) > 1:
            yield Violation("placement", f"group {group} is on devices {sorted(found)}")


def _transfers(graph: OperatorGraph, devices: Devices, placement: Placement) -> Iterator[Violation]:
    """Yield transfers that are double, from elsewhere, too early or of a wrong length, or share a channel."""
    seen = set[tuple[int, int]]()
    channels = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for one in placement.transfers:
        words = f"tensor {one.tensor} from device {one.source} to {one.target}"
        if (one.tensor, one.target) in seen or one.source == one.target:
            yield Violation("placement", f"{words} is sent more often than once")
        seen.add((one.tensor, one.target))
        made = int(graph.producer[one.tensor])
        if placement.device[made] != one.source or one.start < placement.end[made]:
            yield Violation("placement", f"{words} leaves before it is there")
        pair = (one.source, one.target)
        took = round(
            devices.latency_ticks[pair] + graph.tensor_bytes[one.tensor] * devices.ticks_per_byte[pair]
        )
        if one.end - one.start != took:
            yield Violation("placement", f"{words} does not take {took} ticks")
        if devices.communication == "links":
            channels[pair].append((one.start, one.end))
        elif devices.communication == "sequential":
            for end in pair:
                channels[end, end].append((one.start, one.end))
    for channel, spans in channels.items():
        if _overlap(spans):
            yield Violation("placement", f"transfers share the channel of devices {sorted(set(channel))}")


def _overlap(spans: Iterable[tuple[int, int]]) -> bool:
    return any(after[0] < before[1] for before, after in pairwise(sorted(spans)))


def _reads(
    graph: OperatorGraph, placement: Placement, arrivals: dict[tuple[int, int], int]
) -> Iterator[Violation]:
    """Yield operators that start before all that they read is on their device."""
    for tensor, reader in graph.reads.tolist():
        made, home = int(graph.producer[tensor]), int(placement.device[reader])
        there = placement.end[made] if placement.device[made] == home else arrivals.get((tensor, home))
        if there is None or placement.start[reader] < there:
            names = f"operator {graph.names[reader]!r} starts before it has what {graph.names[made]!r} makes"
            yield Violation("placement", names)


def _memory(
    graph: OperatorGraph, devices: Devices, placement: Placement, arrivals: dict[tuple[int, int], int]
) -> Iterator[Violation]:
    """Yield devices with too little memory. All stays to the end of a step, so that its end counts."""
    held = np.zeros(devices.count, dtype=np.int64)
    taken = held.copy()
    np.add.at(held, placement.device, graph.permanent_bytes)
    np.maximum.at(taken, placement.device, graph.temporary_bytes)
    for tensor, target in arrivals:
        held[target] += graph.tensor_bytes[tensor]
    for device, peak in enumerate((held + taken).tolist()):
        lacking = peak - int(devices.memory_bytes[device])
        if lacking > 0:
            yield Violation("placement", f"device {device} lacks {format_bytes(lacking)}")
        if peak != placement.peak_bytes[device]:
            yield Violation("placement", f"device {device} has {format_bytes(peak)}, not as it says")
