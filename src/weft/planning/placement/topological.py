"""m-TOPO and round robin: one walk through the operators in topological order.

Baechi's program for PyTorch walks in the order of the graph's numbers. Depth-first, an operator comes right
behind what it reads. Then a branch is walked to its end, and fewer tensors go from device to device.
"""

from __future__ import annotations

import numpy as np

from weft.errors import InputError, Violation
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.program.arrays import Ints


def topological_fill(graph: OperatorGraph, devices: Devices, walk: Ints | None = None) -> Ints:
    """Fill one device after the other with groups in the order of their first operators: m-TOPO.

    A device gets its share of all bytes, and the largest group more (Baechi, SoCC 2020, section 3.1). Shares
    are proportional to the memory of devices, which bounds them.

    Args:
        walk: all operators in the order of the walk, shape (operators,); else in that of their numbers, as
            published.

    Returns:
        The device of each operator, shape (operators,).

    Raises:
        InputError: when a group is left after the last device.
    """
    order, sizes = _group_sizes(graph, walk)
    memory = devices.memory_bytes
    largest = int(sizes.max(initial=0))
    # The fraction first: the product of two byte counts exceeds 64 bits.
    caps = np.minimum(memory / max(memory.sum(), 1) * sizes.sum() + largest, memory)
    device_of_group = np.zeros(len(sizes), dtype=np.int64)
    device, used = 0, 0
    for group, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        while device < devices.count and used + size > caps[device]:
            device, used = device + 1, 0
        if device == devices.count:
            name = graph.names[int(np.flatnonzero(_dense(graph.groups) == group)[0])]
            problem = f"m-topo fills all {device} devices before the group of operator {name!r}"
            raise InputError(Violation("placement", problem))
        device_of_group[group] = device
        used += size
    found: Ints = device_of_group[_dense(graph.groups)]
    return found


def depth_first_order(graph: OperatorGraph) -> Ints:
    """Return operators each right behind what it reads and no other has read before, shape (operators,).

    Searches go from each operator that nobody reads back to its inputs, and leave out known ones.
    """
    walk: list[int] = []
    seen = [False] * graph.operators
    readers = np.bincount(graph.edges[:, 0], minlength=graph.operators)
    waiting: list[int] = np.flatnonzero(readers == 0)[::-1].tolist()
    while waiting:
        operator = waiting.pop()
        if operator < 0:
            walk.append(~operator)
        elif not seen[operator]:
            seen[operator] = True
            # It comes up again, as its complement, when all that it reads is in the walk.
            waiting.append(~operator)
            waiting.extend(reversed(graph.predecessors[operator]))
    return np.array(walk, dtype=np.int64)


def round_robin(graph: OperatorGraph, devices: Devices) -> Ints:
    """Return device 0 for the first group, device 1 for the second, and so on in turn, shape (operators,)."""
    order, sizes = _group_sizes(graph)
    device_of_group = np.zeros(len(sizes), dtype=np.int64)
    device_of_group[order] = np.arange(len(order), dtype=np.int64) % devices.count
    found: Ints = device_of_group[_dense(graph.groups)]
    return found


def _dense(groups: Ints) -> Ints:
    """Return groups numbered from 0 without gaps, in the order of their numbers."""
    found: Ints = np.unique(groups, return_inverse=True)[1]
    return found


def _group_sizes(graph: OperatorGraph, walk: Ints | None = None) -> tuple[Ints, Ints]:
    """Return groups in the order of their first operators, and the bytes of each: kept ones and largest
    temporary one."""
    dense = _dense(graph.groups)
    _, first = np.unique(dense if walk is None else dense[walk], return_index=True)
    kept = np.bincount(dense, weights=graph.permanent_bytes, minlength=len(first)).astype(np.int64)
    taken = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(taken, dense, graph.temporary_bytes)
    return np.argsort(first, kind="stable"), kept + taken
