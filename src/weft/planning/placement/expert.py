"""Placements that people write down, by rules, of which the fastest counts.

One device has all, the fastest with room. With equal times, consecutive operators are cut where a device has
its share of the work. Devices are filled as `accelerate.infer_auto_device_map` does: consecutive operators
are cut where a device is full. A tower is all that follows from the same inputs, such as an encoder. A branch
is what lies between an operator with several readers and the one where these meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import rustworkx

from weft.planning.placement.board import UNPLACED, Board, Placement
from weft.planning.placement.fastest import Rule, fastest_of_rules
from weft.planning.placement.graph import Devices, OperatorGraph


def expert(graph: OperatorGraph, devices: Devices) -> Placement:
    """Return the placement with the least makespan of those by rules, ordered by the earliest task first.

    Raises:
        InputError: of the last rule, when no rule's placement fits.
    """
    return fastest_of_rules(RULES.values(), graph, devices)


def _one_device(graph: OperatorGraph, devices: Devices) -> list[int]:
    work, total = graph.ticks.sum(axis=0), graph.permanent_bytes.sum()
    roomy = devices.memory_bytes >= total + graph.temporary_bytes.max(initial=0)
    best = int(np.argmin(np.where(roomy, work, np.inf)))
    return [best] * graph.operators


def _equal_times(graph: OperatorGraph, devices: Devices) -> list[int]:
    speeds = 1.0 / graph.ticks.sum(axis=0)
    # A device of any speed then takes equally long for its part.
    return _cut(graph, devices, 1.0 / float(speeds.sum()))


def _filled(graph: OperatorGraph, devices: Devices) -> list[int]:
    return _cut(graph, devices, np.inf)


def _cut(graph: OperatorGraph, devices: Devices, most_ticks: float) -> list[int]:
    """Return devices of consecutive operators: the next one where a device has these ticks, or is full."""
    board, device, used = Board(graph, devices), 0, 0.0
    for operator, took in enumerate(graph.ticks.tolist()):
        home = board.pinned(operator)
        if home == UNPLACED:
            while device + 1 < devices.count and (
                used + took[device] / 2 > most_ticks or board.missing_bytes(operator, device)
            ):
                device, used = device + 1, 0.0
            home = device
        used += took[home]
        board.place(operator, home)
    return board.device


def _towers(graph: OperatorGraph, devices: Devices) -> list[int]:
    sources: list[int] = []
    for operator, before in enumerate(graph.predecessors):
        reached = 0
        for one in before:
            reached |= sources[one]
        sources.append(reached or 1 << operator)
    return _largest_first(graph, devices, sources)


def _branches(graph: OperatorGraph, devices: Devices) -> list[int]:
    flow = rustworkx.PyDiGraph(multigraph=False)
    flow.add_nodes_from(range(graph.operators + 1))
    first = [one for one, before in enumerate(graph.predecessors) if not before]
    flow.extend_from_edge_list([(graph.operators, one) for one in first])
    flow.extend_from_edge_list([*map(tuple, graph.edges.tolist())])
    dominators = rustworkx.immediate_dominators(flow, graph.operators)
    leads = [*graph.successors, first]
    branch = [0] * graph.operators + [UNPLACED]
    for operator, before in enumerate(graph.predecessors):
        behind = before[0] if len(before) == 1 else dominators[operator]
        begins = len(before) < 2 and len(leads[behind]) > 1
        branch[operator] = operator if begins else branch[behind]
    return _largest_first(graph, devices, branch[:-1])


def _largest_first(graph: OperatorGraph, devices: Devices, parts: list[int]) -> list[int]:
    """Return devices of parts: that of the most work first, each where it would end first."""
    numbers = np.unique(np.array(parts, dtype=object), return_inverse=True)[1]
    work = np.zeros((int(numbers.max(initial=-1)) + 1, devices.count))
    np.add.at(work, numbers, graph.ticks)
    load, home = np.zeros(devices.count), np.zeros(len(work), dtype=np.int64)
    for part in np.argsort(-work.min(axis=1), kind="stable").tolist():
        home[part] = int(np.argmin(load + work[part]))
        load[home[part]] += work[part, home[part]]
    # A group goes where its first operator does.
    _, first, group = np.unique(graph.groups, return_index=True, return_inverse=True)
    found: list[int] = home[numbers[first[group]]].tolist()
    return found


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "one device": _one_device,
        "equal times": _equal_times,
        "filled": _filled,
        "towers": _towers,
        "branches": _branches,
    }
)
