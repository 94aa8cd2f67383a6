"""Repair of a placement: parts of its longest chain move to other devices while the makespan falls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.planning.placement.board import Placement
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.learned import Improvement, lacking_bytes
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.verification import scheduled
from weft.program.arrays import Ints
from weft.randomness import counter_seed

EVALUATIONS = 500


def repaired(
    graph: OperatorGraph,
    devices: Devices,
    placement: Placement,
    *,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
) -> Iterator[Improvement]:
    """Yield a placement, then each one that is better than all before, after so many evaluations.

    Each evaluation moves an operator of the longest chain, with up to 15 around it, to another device. Both
    the order so far and that by the earliest task first are tried.
    """
    yield Improvement(0, placement)
    if devices.count == 1:
        return
    generator = np.random.default_rng(counter_seed(seed, "repair"))
    group: Ints = np.unique(graph.groups, return_inverse=True)[1]
    best = placement
    # On few operators, most moves are known.
    known: dict[tuple[bytes, bytes], Placement | None] = {}
    for done in range(1, evaluations + 1):
        first = int(generator.choice(longest_chain_operators(graph, best)))
        device = best.device.copy()
        part = _around(graph, device, first, 2 ** int(generator.integers(0, 5)))
        target = (device[first] + generator.integers(1, devices.count)) % devices.count
        device[np.isin(group, group[part])] = target
        key = device.tobytes(), best.sequence.tobytes()
        if key not in known:
            known[key] = _better_order(graph, devices, device, best.sequence)
        tried = known[key]
        if tried is None:
            continue
        if tried.makespan < best.makespan:
            yield Improvement(done, tried)
        if tried.makespan <= best.makespan:
            best = tried


def _better_order(graph: OperatorGraph, devices: Devices, device: Ints, sequence: Ints) -> Placement | None:
    """Return operators on these devices, in this order or by the earliest task first; None without room."""
    if lacking_bytes(graph, devices, device):
        return None
    return min(
        scheduled(graph, devices, device, sequence),
        earliest_task_first(graph, devices, pinned=device.tolist()),
        key=lambda one: one.makespan,
    )


def _around(graph: OperatorGraph, device: Ints, first: int, count: int) -> list[int]:
    """Return an operator and up to so many in all that are nearest to it on its device."""
    found = {first: None}
    for operator in (waiting := [first]):
        for one in (*graph.predecessors[operator], *graph.successors[operator]):
            if len(found) < count and one not in found and device[one] == device[first]:
                found[one] = None
                waiting.append(one)
    return [*found]


def longest_chain_operators(graph: OperatorGraph, placement: Placement) -> list[int]:
    """Return operators of which each starts as soon as the next one allows, from the last to the first."""
    arrivals = {(one.tensor, one.target): one.end for one in placement.transfers}
    before: dict[int, int] = {}
    last: dict[int, int] = {}
    for operator in placement.sequence.tolist():
        home = int(placement.device[operator])
        if home in last:
            before[operator] = last[home]
        last[home] = operator
    operator = int(placement.end.argmax())
    chain = [operator]
    while placement.start[operator] > 0:
        start, home = placement.start[operator], int(placement.device[operator])
        follows = [
            made
            for tensor in graph.tensors_read[operator]
            if arrivals.get((tensor, home), placement.end[made := int(graph.producer[tensor])]) == start
        ]
        if not follows and operator not in before:
            break
        operator = follows[0] if follows else before[operator]
        chain.append(operator)
    return chain
