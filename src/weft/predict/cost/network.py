"""Times of messages and collectives over the links of a cluster.

A message takes its link's latency plus bytes over bandwidth. A collective takes the faster of a flat ring
and, where a group has several ranks on each of several nodes, a hierarchical one (reduce inside the nodes,
between them, and spread inside them). An all-reduce may also take a pair of trees, whose latency grows with
the logarithm of the ranks. A node's link is shared by its devices that communicate at once. Between ranks of
one node whose device was measured, the measured tables take the place of the description.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2, sqrt

from weft.describe.cluster import Cluster, Link
from weft.predict.cost.tables import value_at
from weft.predict.profile import MachineMeasurement


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a cluster; `machine` is what was measured between two ranks of one node."""

    cluster: Cluster
    machine: MachineMeasurement | None = None

    def message_s(self, rank: int, peer: int, sent_bytes: int, sharing: int = 1) -> tuple[float, float]:
        """(seconds the link is busy, further seconds until the message has arrived).

        `sharing` flows leave the sender's node at once; it matters between nodes only.
        """
        table = self.machine.message if self._measured((rank, peer)) and self.machine is not None else ()
        if table:
            latency_s = value_at(table, 0.0)
            return max(0.0, value_at(table, float(sent_bytes)) - latency_s), latency_s
        link = self._link(rank, peer, sharing)
        return sent_bytes / link.bytes_per_s, link.latency_s

    def all_reduce_s(self, ranks: Sequence[int], reduced_bytes: int, sharing: int = 1) -> float:
        """Every rank ends with the sum of `reduced_bytes` of all.

        `sharing` groups use the links between the same nodes at once.
        """
        if len(ranks) > 1 and self._measured(ranks) and self.machine is not None and self.machine.all_reduce:
            return _scaled(self.machine.all_reduce, len(ranks), reduced_bytes)
        one_way = self._one_way_s(ranks, reduced_bytes, sharing)
        return 2.0 * min(one_way, self._trees_s(sorted(ranks), reduced_bytes, sharing))

    def reduce_scatter_s(self, ranks: Sequence[int], total_bytes: int, sharing: int = 1) -> float:
        """Every rank ends with its share of the sum of `total_bytes`."""
        return self._one_way_s(ranks, total_bytes, sharing)

    def all_gather_s(self, ranks: Sequence[int], total_bytes: int, sharing: int = 1) -> float:
        """Every rank ends with the `total_bytes` of which it had a share."""
        return self._one_way_s(ranks, total_bytes, sharing)

    def _one_way_s(self, ranks: Sequence[int], total_bytes: int, sharing: int) -> float:
        """A reduce-scatter or an all-gather, which are each other's mirror image."""
        if len(ranks) < 2:
            return 0.0
        flat = self._ring_s(sorted(ranks), total_bytes, sharing)
        members = Counter(self.cluster.node_of(rank) for rank in ranks)
        counts = set(members.values())
        if len(members) == 1 or counts == {1} or len(counts) > 1:
            return flat
        return min(flat, self._hierarchical_s(sorted(ranks), counts.pop(), total_bytes, sharing))

    def _ring_s(self, ranks: Sequence[int], total_bytes: int, sharing: int) -> float:
        """(n - 1) turns, each as slow as the slowest link of the ring."""
        ring = [*pairwise(ranks), (ranks[-1], ranks[0])]
        links = {self._link(rank, peer, sharing) for rank, peer in ring}
        share = total_bytes / len(ranks)
        turn = max(link.latency_s for link in links) + share / min(link.bytes_per_s for link in links)
        return (len(ranks) - 1) * turn

    def _hierarchical_s(self, ranks: Sequence[int], on_a_node: int, total_bytes: int, sharing: int) -> float:
        """Inside every node on all bytes, then between the nodes on each device's share of them."""
        nodes = [ranks[index : index + on_a_node] for index in range(0, len(ranks), on_a_node)]
        inside = max(self._ring_s(node, total_bytes, 1) for node in nodes)
        # All devices of a node talk to their twins on the other nodes at once.
        between = self._ring_s([node[0] for node in nodes], total_bytes // on_a_node, sharing * on_a_node)
        return inside + between

    def _trees_s(self, ranks: Sequence[int], total_bytes: int, sharing: int) -> float:
        """Reducing to one rank, or spreading from it, over two binary trees with half of the bytes each.

        A rank inside one tree is a leaf of the other, so that each sends and receives all bytes once (Sanders
        et al., Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009). Trees join the
        ranks of a node before the nodes. In k pieces over `depth` levels this takes
        (depth + k - 1) (latency + bytes / (k bandwidth)); k is the best real number.
        """
        if len(ranks) < 2:
            return 0.0
        members = Counter(self.cluster.node_of(rank) for rank in ranks)
        depth = ceil(log2(max(members.values()))) + ceil(log2(len(members)))
        links = {self._link(rank, peer, sharing) for rank, peer in pairwise(ranks)}
        latency_s = max(link.latency_s for link in links)
        moving_s = total_bytes / min(link.bytes_per_s for link in links)
        if latency_s == 0.0:
            return moving_s
        pieces = max(1.0, sqrt((depth - 1) * moving_s / latency_s))
        return (depth + pieces - 1) * (latency_s + moving_s / pieces)

    def _link(self, rank: int, peer: int, sharing: int) -> Link:
        link = self.cluster.link_between(rank, peer)
        if sharing > 1 and self.cluster.node_of(rank) != self.cluster.node_of(peer):
            return Link(link.bytes_per_s / sharing, link.latency_s)
        return link

    def _measured(self, ranks: Sequence[int]) -> bool:
        """Whether the ranks are devices of one node, of the measured kind."""
        return (
            self.machine is not None
            and self.machine.device == self.cluster.device_of(ranks[0]).name
            and len({self.cluster.node_of(rank) for rank in ranks}) == 1
        )


def _scaled(table: Sequence[tuple[float, float]], ranks: int, reduced_bytes: int) -> float:
    """A measured all-reduce of two ranks, scaled to n as rings scale.

    Two ranks take two turns and move all the bytes; n ranks take 2 (n - 1) turns and move 2 (n - 1) / n of
    them.
    """
    empty = table[0][1]
    moving = max(0.0, value_at(table, float(reduced_bytes)) - empty)
    return (ranks - 1) * empty + 2.0 * (ranks - 1) / ranks * moving
