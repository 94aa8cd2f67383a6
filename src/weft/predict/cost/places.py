"""Places of the ranks of a cluster, as columns, and the links between nodes that groups of them use.

The price of a plan reads the place of every rank, of up to ten thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.one_line import one_line
from weft.program.arrays import Floats, Ints, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of ranks over nodes, as far as it decides the time of collectives.

    Attributes:
        ranks, nodes: numbers of ranks, and of their nodes.
        fewest_on_a_node, most_on_a_node: ranks per node, among nodes that have any.
        even: True if all of these nodes have equally many.
        inside: groups of the nodes with two or more of the ranks.
        along, around: pairs of groups with neighbouring ranks, in rank order, on different nodes. `around`
            adds the pair of the last rank and the first, which are neighbours on a ring.
    """

    ranks: int
    nodes: int
    fewest_on_a_node: int
    most_on_a_node: int
    inside: tuple[int, ...]
    along: tuple[tuple[int, int], ...]
    around: tuple[tuple[int, int], ...]

    @property
    def even(self) -> bool:
        return self.fewest_on_a_node == self.most_on_a_node


@dataclass(frozen=True)
class ClusterPlaces:
    """Columns over the ranks of a cluster, all of shape (ranks,), built on first use."""

    cluster: Cluster

    __repr__ = one_line

    @cached_property
    def group(self) -> Ints:
        """Index of each rank's group of nodes."""
        sizes = [group.count * group.devices for group in self.cluster.groups]
        return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)

    @cached_property
    def node(self) -> Ints:
        """Number of each rank's node, over all groups."""
        sizes = [group.devices for group in self.cluster.groups for _ in range(group.count)]
        return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)

    @cached_property
    def speed(self) -> Floats:
        """Speed of each rank, relative to its device."""
        parts = [
            np.tile(np.array(group.speeds or (1.0,) * group.devices), group.count)
            for group in self.cluster.groups
        ]
        return np.concatenate(parts)

    @cached_property
    def synchronous(self) -> Mask:
        of_group = np.array([group.device.synchronous for group in self.cluster.groups], dtype=np.bool_)
        return of_group[self.group]

    @cached_property
    def usable_bytes(self) -> Ints:
        """Memory for tensors and communicators on each rank's device."""
        of_group = np.array([group.device.usable_bytes for group in self.cluster.groups], dtype=np.int64)
        return of_group[self.group]

    @cached_property
    def room_bytes(self) -> Ints:
        """Memory for tensors on each rank's device, beside the communicators of a usual plan."""
        of_group = np.array([group.device.room_bytes for group in self.cluster.groups], dtype=np.int64)
        return of_group[self.group]

    @cached_property
    def paces(self) -> tuple[tuple[int, float], ...]:
        """The existing combinations of group and speed, rising."""
        return tuple(
            (index, speed)
            for index, group in enumerate(self.cluster.groups)
            for speed in sorted(set(group.speeds or (1.0,)))
        )

    @cached_property
    def pace(self) -> Ints:
        """Index of each rank's combination in `paces`."""
        number = {pace: index for index, pace in enumerate(self.paces)}
        parts = [
            np.tile([number[index, speed] for speed in group.speeds or (1.0,) * group.devices], group.count)
            for index, group in enumerate(self.cluster.groups)
        ]
        return np.concatenate(parts)

    def spread_of(self, ranks: Sequence[int]) -> Spread:
        """Return the distribution of the ranks, one or more, over nodes."""
        rank = np.sort(np.array(ranks, dtype=np.int64))
        node, group = self.node[rank], self.group[rank]
        crosses = node[1:] != node[:-1]
        last = np.append(np.flatnonzero(crosses), len(rank) - 1)
        on_a_node = np.diff(last, prepend=-1)
        groups = group[last].tolist()
        along = sorted(set(pairwise(groups)))
        around = sorted({*along, (groups[-1], groups[0])}) if len(groups) > 1 else along
        return Spread(
            ranks=len(rank),
            nodes=len(groups),
            fewest_on_a_node=int(on_a_node.min()),
            most_on_a_node=int(on_a_node.max()),
            inside=tuple(sorted(set(group[last[on_a_node > 1]].tolist()))),
            along=tuple(along),
            around=tuple(around),
        )

    def leaving_and_entering(self, here: Ints, there: Ints) -> tuple[Mask, Ints, Ints]:
        """Return (crosses, leaving link, entering link) of messages from ranks `here` to ranks `there`.

        The first is True for a message between nodes; the links count only there. All arrays have one shape.
        A node has one link in each direction for every group of nodes it exchanges with.
        """
        groups = len(self.cluster.groups)
        leaving = 2 * (self.node[here] * groups + self.group[there]) + 1
        entering = 2 * (self.node[there] * groups + self.group[here])
        return self.node[here] != self.node[there], leaving, entering

    def links_of_rings(self, rings: Sequence[Sequence[int]] | Ints) -> tuple[Ints, Ints]:
        """Return (ring, link) for every link of a node on rings over ranks, both rising, each pair once.

        A ring joins neighbouring ranks, and the last one with the first. It enters and leaves each node once.
        """
        lengths = np.array([len(ranks) for ranks in rings], dtype=np.int64)
        ring = np.repeat(np.arange(len(lengths)), lengths)
        rank = np.fromiter(chain.from_iterable(rings), dtype=np.int64, count=len(ring))
        rank = rank[np.lexsort((rank, ring))]
        following = np.arange(1, len(ring) + 1)
        ends = np.cumsum(lengths)
        following[ends[lengths > 0] - 1] = (ends - lengths)[lengths > 0]
        crosses, leaving, entering = self.leaving_and_entering(rank, rank[following])
        links = np.concatenate([leaving[crosses], entering[crosses]])
        codes = np.tile(ring[crosses], 2) * self._links + links
        return np.divmod(np.unique(codes), self._links)

    @cached_property
    def _links(self) -> int:
        """A number above the highest number of a link."""
        return 2 * (int(self.node[-1]) + 1) * len(self.cluster.groups)
