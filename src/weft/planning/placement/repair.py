"""Repair of a placement: its makespan falls by moving and swapping groups."""

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

    Each evaluation moves a group with an operator on the longest chain to another device, or swaps it with a
    group there. Both the order so far and that by the earliest task first are tried. Equal makespans are kept.
    """
    yield Improvement(0, placement)
    generator = np.random.default_rng(counter_seed(seed, "repair"))
    group: Ints = np.unique(graph.groups, return_inverse=True)[1]
    best = placement
    for done in range(1, evaluations + 1):
        chain = group[longest_chain_operators(graph, best)]
        device = best.device.copy()
        first = generator.choice(chain)
        home = device[np.flatnonzero(group == first)[0]]
        other = (home + generator.integers(1, max(devices.count, 2))) % devices.count
        if generator.random() < 0.5 and (there := np.flatnonzero(device == other)).size:
            device[group == group[generator.choice(there)]] = home
        device[group == first] = other
        if lacking_bytes(graph, devices, device):
            continue
        tried = min(
            scheduled(graph, devices, device, best.sequence),
            earliest_task_first(graph, devices, pinned=device.tolist()),
            key=lambda one: one.makespan,
        )
        if tried.makespan < best.makespan:
            yield Improvement(done, tried)
        if tried.makespan <= best.makespan:
            best = tried


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
