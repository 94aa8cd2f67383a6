"""Fewer operators before placing: groups, co-placement and fusion (Baechi, SoCC 2020, section 4).

Most of a placement's speed comes from here. A group is placed as a unit. Fusion contracts edges inside groups
until no more can be contracted without a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np
import rustworkx

from weft.describe.one_line import one_line
from weft.planning.placement.board import Placement
from weft.planning.placement.graph import Devices, OperatorGraph, lists_of
from weft.program.arrays import Ints

# Groups by the paper: an operator joins its only reader. By chains: if that reader reads nothing else. Or
# neither.
CoPlacement = Literal["readers", "chains", "none"]


@dataclass(frozen=True, kw_only=True)
class PreparedGraph:
    """A fused graph, and the fused operator of each operator of the original, shape (operators,)."""

    original: OperatorGraph
    fused: OperatorGraph
    member_of: Ints

    def __repr__(self) -> str:
        return one_line(self, f"{self.original.operators} operators as {self.fused.operators}")

    def unfused(self, device: Ints) -> Ints:
        """Return the device of each original operator, given those of the fused ones."""
        found: Ints = device[self.member_of]
        return found

    def sequence(self, placement: Placement) -> Ints:
        """Return the original operators in the order of a placement of fused ones."""
        position = np.empty(self.fused.operators, dtype=np.int64)
        position[placement.sequence] = np.arange(self.fused.operators)
        found: Ints = np.argsort(position[self.member_of], kind="stable")
        return found


def prepared(graph: OperatorGraph, devices: Devices, co_placement: CoPlacement = "readers") -> PreparedGraph:
    """Return the graph with co-placed groups and fused operators.

    With `chains` an operator also joins a neighbour if it takes less time than their transfer. Apart, the
    transfer would cost more than running side by side gains.
    """
    groups = _joined(graph, _co_placed(graph, devices, co_placement))
    return _fused(replace(graph, groups=groups))


def _co_placed(graph: OperatorGraph, devices: Devices, co_placement: CoPlacement) -> Ints:
    """Return the edges whose ends share a device, shape (joined, 2)."""
    edges = graph.edges
    if co_placement == "none" or not len(edges):
        return edges[:0]
    outgoing = np.bincount(edges[:, 0], minlength=graph.operators)
    only_reader = outgoing[edges[:, 0]] == 1
    if co_placement == "readers":
        by_readers: Ints = edges[only_reader]
        return by_readers
    incoming = np.bincount(edges[:, 1], minlength=graph.operators)
    only_read = incoming[edges[:, 1]] == 1
    ticks = graph.ticks.min(axis=1)
    shorter = np.minimum(ticks[edges[:, 0]], ticks[edges[:, 1]])
    small = (shorter < devices.least_transfer_ticks(graph.edge_bytes)) & (only_reader | only_read)
    by_chains: Ints = edges[(only_reader & only_read) | small]
    return by_chains


def _joined(graph: OperatorGraph, pairs: Ints) -> Ints:
    """Return groups numbered from 0 that join both the graph's and the ends of pairs, shape (operators,)."""
    first = np.unique(graph.groups, return_index=True, return_inverse=True)
    together = rustworkx.PyGraph(multigraph=False)
    together.add_nodes_from(range(graph.operators))
    same = np.stack([first[1][first[2]], np.arange(graph.operators)], axis=1)
    together.extend_from_edge_list([*map(tuple, same[same[:, 0] != same[:, 1]].tolist())])
    together.extend_from_edge_list([*map(tuple, pairs.tolist())])
    groups = np.empty(graph.operators, dtype=np.int64)
    for number, members in enumerate(rustworkx.connected_components(together)):
        groups[list(members)] = number
    return groups


def _fused(graph: OperatorGraph) -> PreparedGraph:
    """Contract edges inside groups while this makes no cycle.

    An edge may be contracted if its end reads nothing else, or if nothing else reads its start. Then no other
    path joins them. Contractions of one of these kinds leave the others of it legal.
    """
    label = np.arange(graph.operators)
    changed = True
    while changed:
        changed = False
        for child, parent in ((1, 0), (0, 1)):
            edges = _edges_of(graph, label)
            inside = graph.groups[edges[:, 0]] == graph.groups[edges[:, 1]]
            degree = np.bincount(edges[:, child], minlength=graph.operators)
            chosen = edges[inside & (degree[edges[:, child]] == 1)]
            if len(chosen):
                label = _followed(label, chosen[:, child], chosen[:, parent])
                changed = True
    return _contracted(graph, label)


def _edges_of(graph: OperatorGraph, label: Ints) -> Ints:
    """Return the edges between operators with different labels, each once, shape (edges, 2)."""
    ends = label[graph.edges]
    keys = np.unique(ends[ends[:, 0] != ends[:, 1]] @ np.array([graph.operators, 1]))
    return np.stack([keys // graph.operators, keys % graph.operators], axis=1)


def _followed(label: Ints, children: Ints, parents: Ints) -> Ints:
    """Return labels where each child has that of its parent, and so on to the last parent."""
    leads = np.arange(len(label))
    leads[children] = parents
    while not np.array_equal(further := leads[leads], leads):
        leads = further
    found: Ints = leads[label]
    return found


def _contracted(graph: OperatorGraph, label: Ints) -> PreparedGraph:
    """Return the graph whose operators are those of one label together, in a topological order."""
    _, first, member_of = np.unique(label, return_index=True, return_inverse=True)
    order = _topological(len(first), member_of[graph.edges], first)
    position = np.empty(len(first), dtype=np.int64)
    position[order] = np.arange(len(first))
    member_of, first = position[member_of], first[order]
    count, sums = len(first), np.add.at
    ticks = np.zeros((count, graph.ticks.shape[1]), dtype=np.int64)
    permanent, temporary = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    sums(ticks, member_of, graph.ticks)
    sums(permanent, member_of, graph.permanent_bytes)
    np.maximum.at(temporary, member_of, graph.temporary_bytes)
    made = member_of[graph.producer]
    reads = np.stack([graph.reads[:, 0], member_of[graph.reads[:, 1]]], axis=1)
    reads = np.unique(reads[made[reads[:, 0]] != reads[:, 1]], axis=0)
    kept, renumbered = np.unique(reads[:, 0], return_inverse=True)
    fused = OperatorGraph(
        names=[graph.names[one] for one in first.tolist()],
        ticks=ticks,
        permanent_bytes=permanent,
        temporary_bytes=temporary,
        producer=made[kept],
        tensor_bytes=graph.tensor_bytes[kept],
        reads=np.stack([renumbered, reads[:, 1]], axis=1),
        groups=graph.groups[first],
    )
    return PreparedGraph(original=graph, fused=fused, member_of=member_of)


def _topological(count: int, edges: Ints, first: Ints) -> Ints:
    """Return nodes behind all that they read; of those that may come next, the one with the first member."""
    edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)
    missing = np.bincount(edges[:, 1], minlength=count).tolist()
    readers = lists_of(edges[:, 0], edges[:, 1], count)
    key = first.tolist()
    ready = [(key[node], node) for node in range(count) if not missing[node]]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, (key[reader], reader))
    return np.array(order, dtype=np.int64)
