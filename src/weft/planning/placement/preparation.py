"""Fewer operators before placing: groups, co-placement and fusion (Baechi, SoCC 2020, section 4).

Most of a placement's speed comes from here. A group is placed as a unit. Fusion contracts edges inside groups
until no more can be contracted without a cycle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from weft.describe.one_line import one_line
from weft.planning.placement.board import Placement
from weft.planning.placement.graph import Devices, OperatorGraph, topological_order
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

    Groups stay so small that they fit however others lie. With D bytes in all and M on n devices, up to (M -
    D) / n bytes always have room. Half of that is for groups, the rest for arrivals.

    With `chains` an operator also joins a neighbour while one of both groups takes less time than a transfer.
    Apart, the transfer would cost more than running side by side gains.
    """
    return _fused(replace(graph, groups=_co_placed(graph, devices, co_placement)))


def _co_placed(graph: OperatorGraph, devices: Devices, co_placement: CoPlacement) -> Ints:
    """Return groups numbered from 0, shape (operators,), where ends of edges have joined."""
    groups: Ints = np.unique(graph.groups, return_inverse=True)[1]
    edges = graph.edges
    if co_placement == "none" or not len(edges):
        return groups
    only_reader = np.bincount(edges[:, 0])[edges[:, 0]] == 1
    only_read = np.bincount(edges[:, 1])[edges[:, 1]] == 1
    always = only_reader if co_placement == "readers" else only_reader & only_read
    chosen = only_reader if co_placement == "readers" else only_reader | only_read
    joined = _JoinedGroups(graph, devices, groups)
    columns = (groups[edges[chosen]], always[chosen], devices.least_transfer_ticks(graph.edge_bytes[chosen]))
    for (first, second), at_once, transfer in zip(*(one.tolist() for one in columns), strict=True):
        joined.join(first, second, math.inf if at_once else transfer)
    leads = np.array([joined.lead(one) for one in range(int(groups.max()) + 1)])
    found: Ints = np.unique(leads[groups], return_inverse=True)[1]
    return found


class _JoinedGroups:
    """Groups that have joined; each knows its bytes and its ticks on fastest devices."""

    def __init__(self, graph: OperatorGraph, devices: Devices, groups: Ints) -> None:
        count = int(groups.max(initial=-1)) + 1
        taken = np.zeros(count, dtype=np.int64)
        np.maximum.at(taken, groups, graph.temporary_bytes)
        kept = np.bincount(groups, weights=graph.permanent_bytes, minlength=count)
        self._leads = list(range(count))
        self._kept: list[float] = kept.tolist()
        self._ticks: list[float] = np.bincount(groups, weights=graph.ticks.min(axis=1)).tolist()
        spare = (
            float(devices.memory_bytes.sum()) - float(kept.sum()) - devices.count * int(taken.max(initial=0))
        )
        self._most_bytes = spare / devices.count / 2

    def lead(self, group: int) -> int:
        """Return the group that stands for all that a group has joined."""
        while self._leads[group] != group:
            self._leads[group] = group = self._leads[self._leads[group]]
        return group

    def join(self, first: int, second: int, transfer_ticks: float) -> None:
        """Join two groups if one takes less than a transfer, and both together are small enough."""
        one, other = sorted((self.lead(first), self.lead(second)))
        kept = self._kept[one] + self._kept[other]
        if one == other or kept > self._most_bytes:
            return
        if min(self._ticks[one], self._ticks[other]) < transfer_ticks:
            self._leads[other], self._kept[one] = one, kept
            self._ticks[one] += self._ticks[other]


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
    order = topological_order(len(first), member_of[graph.edges], first)
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
