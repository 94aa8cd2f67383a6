"""Times of messages and collectives over the links of a cluster.

A message takes its link's latency plus bytes over bandwidth. A collective takes the faster of a flat ring
and, where a group has several ranks on each of several nodes, a hierarchical one (reduce inside the nodes,
between them, and spread inside them). An all-reduce may also take a pair of trees, whose latency grows with
the logarithm of the ranks. These are times of a collective that has the links of its nodes to itself. Between
ranks of one node whose device was measured, the measured tables take the place of the description.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2, sqrt
from typing import NamedTuple

from weft.describe.cluster import Cluster, Link
from weft.predict.corrections import Correction
from weft.predict.cost.tables import value_at
from weft.predict.profile import MachineMeasurement


class CollectiveTime(NamedTuple):
    """A collective alone on its links.

    Attributes:
        seconds: from its start to its end.
        link_s: how long what it moves over a node's link, in one direction, keeps that busy; the rest of the
            time the link waits for latencies and for what happens inside the nodes. At most `seconds`.
    """

    seconds: float
    link_s: float

    def scaled(self, factor: float) -> CollectiveTime:
        return CollectiveTime(factor * self.seconds, factor * self.link_s)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a cluster; `machine` is what was measured between two ranks of one node.

    `correction` multiplies all times.
    """

    cluster: Cluster
    machine: MachineMeasurement | None = None
    correction: Correction | None = None

    def message_s(self, rank: int, peer: int, sent_bytes: int, sharing: int = 1) -> tuple[float, float]:
        """(seconds the link is busy, further seconds until the message has arrived).

        `sharing` flows leave the sender's node at once; it matters between nodes only.
        """
        factor = self.correction.messages if self.correction is not None else 1.0
        table = self.machine.message if self._measured((rank, peer)) and self.machine is not None else ()
        if table:
            latency_s = value_at(table, 0.0)
            busy_s = max(0.0, value_at(table, float(sent_bytes)) - latency_s)
        else:
            link = self._link(rank, peer, sharing)
            busy_s, latency_s = sent_bytes / link.bytes_per_s, link.latency_s
        return factor * busy_s, factor * latency_s

    def all_reduce_s(self, ranks: Sequence[int], reduced_bytes: int) -> float:
        """Seconds of `all_reduce`."""
        return self.all_reduce(ranks, reduced_bytes).seconds

    def all_reduce(self, ranks: Sequence[int], reduced_bytes: int) -> CollectiveTime:
        """Every rank ends with the sum of `reduced_bytes` of all."""
        if len(ranks) > 1 and self._measured(ranks) and self.machine is not None and self.machine.all_reduce:
            measured_s = _scaled(self.machine.all_reduce, len(ranks), reduced_bytes)
            return CollectiveTime(measured_s, 0.0).scaled(self._factor)
        one_way = min(self._one_way(ranks, reduced_bytes), self._trees(sorted(ranks), reduced_bytes))
        return one_way.scaled(2.0 * self._factor)

    def reduce_scatter(self, ranks: Sequence[int], total_bytes: int) -> CollectiveTime:
        """Every rank ends with its share of the sum of `total_bytes`."""
        return self._one_way(ranks, total_bytes).scaled(self._factor)

    def all_gather(self, ranks: Sequence[int], total_bytes: int) -> CollectiveTime:
        """Every rank ends with the `total_bytes` of which it had a share."""
        return self._one_way(ranks, total_bytes).scaled(self._factor)

    @property
    def _factor(self) -> float:
        return self.correction.collectives if self.correction is not None else 1.0

    def _one_way(self, ranks: Sequence[int], total_bytes: int) -> CollectiveTime:
        """A reduce-scatter or an all-gather, which are each other's mirror image."""
        if len(ranks) < 2:
            return CollectiveTime(0.0, 0.0)
        flat = self._ring(sorted(ranks), total_bytes)
        members = Counter(self.cluster.node_of(rank) for rank in ranks)
        counts = set(members.values())
        if len(members) == 1 or counts == {1} or len(counts) > 1:
            return flat
        return min(flat, self._hierarchical(sorted(ranks), counts.pop(), total_bytes))

    def _ring(self, ranks: Sequence[int], total_bytes: float, rings: int = 1) -> CollectiveTime:
        """(n - 1) turns, each as slow as the slowest link of the ring; `rings` leave each node at once."""
        ring = [*pairwise(ranks), (ranks[-1], ranks[0])]
        links = {self._link(rank, peer, rings) for rank, peer in ring}
        turns, share = len(ranks) - 1, total_bytes / len(ranks)
        turn = max(link.latency_s for link in links) + share / min(link.bytes_per_s for link in links)
        return CollectiveTime(turns * turn, turns * self._on_link_s(ring, share, rings))

    def _hierarchical(self, ranks: Sequence[int], on_a_node: int, total_bytes: int) -> CollectiveTime:
        """Inside every node on all bytes, then between the nodes on each device's share of them."""
        nodes = [ranks[index : index + on_a_node] for index in range(0, len(ranks), on_a_node)]
        inside = max(self._ring(node, total_bytes).seconds for node in nodes)
        # All devices of a node talk to their twins on the other nodes at once.
        between = self._ring([node[0] for node in nodes], total_bytes / on_a_node, on_a_node)
        return CollectiveTime(inside + between.seconds, between.link_s)

    def _trees(self, ranks: Sequence[int], total_bytes: int) -> CollectiveTime:
        """Reducing to one rank, or spreading from it, over two binary trees with half of the bytes each.

        A rank inside one tree is a leaf of the other, so that each sends and receives all bytes once (Sanders
        et al., Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009). Trees join the
        ranks of a node before the nodes. In k pieces over `depth` levels this takes
        (depth + k - 1) (latency + bytes / (k bandwidth)); k is the best real number.
        """
        if len(ranks) < 2:
            return CollectiveTime(0.0, 0.0)
        members = Counter(self.cluster.node_of(rank) for rank in ranks)
        depth = ceil(log2(max(members.values()))) + ceil(log2(len(members)))
        pairs = list(pairwise(ranks))
        links = {self._link(rank, peer) for rank, peer in pairs}
        latency_s = max(link.latency_s for link in links)
        moving_s = total_bytes / min(link.bytes_per_s for link in links)
        on_link_s = self._on_link_s(pairs, total_bytes)
        if latency_s == 0.0:
            return CollectiveTime(moving_s, on_link_s)
        pieces = max(1.0, sqrt((depth - 1) * moving_s / latency_s))
        return CollectiveTime((depth + pieces - 1) * (latency_s + moving_s / pieces), on_link_s)

    def _on_link_s(self, pairs: Sequence[tuple[int, int]], moved_bytes: float, sharing: int = 1) -> float:
        """Seconds for which `moved_bytes` between each of the pairs keep the slowest link of a node busy."""
        between = [pair for pair in pairs if self.cluster.node_of(pair[0]) != self.cluster.node_of(pair[1])]
        return max((moved_bytes / self._link(*pair, sharing).bytes_per_s for pair in between), default=0.0)

    def _link(self, rank: int, peer: int, sharing: int = 1) -> Link:
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
