"""Times of messages and collectives over the links of a cluster.

A message takes its link's latency plus bytes over bandwidth. A collective takes the faster of a flat ring and
a hierarchical algorithm. The latter needs a group with several ranks on each of several nodes. It reduces
inside the nodes, reduces between them, and spreads inside them. An all-reduce may also use two trees, with a
latency that grows with the logarithm of the ranks. Collectives of GPUs have the algorithms and the speeds of
their library; see `weft.predict.cost.collective_library`. All times assume that the collective has its nodes'
links to itself. Between ranks of one node with a measured device, measured tables replace the description.

Through host memory (the transport `host`), a device copies its bytes to its host before, and from its host
behind. Inside a node they go over TCP; see `weft.predict.cost.host_link`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, sqrt
from typing import NamedTuple

import numpy as np

from weft.describe.cluster import Cluster, Link
from weft.describe.device import Device
from weft.describe.one_line import one_line
from weft.describe.synchronisation import AS_IT_IS, Wire
from weft.predict.corrections import Correction
from weft.predict.cost import collective_library as library
from weft.predict.cost.host_link import LOOPBACK, host_copy_s
from weft.predict.cost.measured_collectives import collective_s, ranks_half_width
from weft.predict.cost.places import ClusterPlaces, Spread
from weft.predict.profile import MachineMeasurement, Table, value_at
from weft.program.arrays import Ints

Ranks = Sequence[int] | Spread
"""Ranks, or their distribution over nodes."""


class CollectiveTime(NamedTuple):
    """The time of a collective alone on its links.

    Attributes:
        seconds: from its start to its end.
        link_s: seconds in which its bytes keep one direction of a node's link busy; at most `seconds`. For
            the rest, the link waits for latencies and for exchanges inside the nodes.
    """

    seconds: float
    link_s: float

    def scaled(self, factor: float) -> CollectiveTime:
        return CollectiveTime(factor * self.seconds, factor * self.link_s)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a cluster; `machine` holds the measurements between two ranks of one node.

    `correction` multiplies all times. `wire` gives the bytes sent for each byte of a collective. With
    `through_host`, devices that are not their own hosts exchange all bytes through host memory.
    """

    cluster: Cluster
    machine: MachineMeasurement | None = None
    correction: Correction | None = None
    wire: Wire = AS_IT_IS
    through_host: bool = False

    __repr__ = one_line

    def carrying(self, wire: Wire) -> Network:
        """Return the same links for collectives with the traffic per byte of `wire`."""
        return self if wire == self.wire else replace(self, wire=wire)

    @cached_property
    def places(self) -> ClusterPlaces:
        """The places of the ranks."""
        return ClusterPlaces(self.cluster)

    def message_s(self, rank: int, peer: int, sent_bytes: int, sharing: int = 1) -> tuple[float, float]:
        """Return (seconds the link is busy, further seconds until the message has arrived).

        `sharing` flows leave the sender's node at once; this matters between nodes only.
        """
        factor = self.correction.messages if self.correction is not None else 1.0
        here, there = self.cluster.node_of(rank), self.cluster.node_of(peer)
        machine = self._measured(here[0]) if here == there else None
        if machine is not None and machine.message:
            table = machine.message
            latency_s = value_at(table, 0.0)
            busy_s = max(0.0, value_at(table, float(sent_bytes)) - latency_s)
        else:
            link = self._links_inside[self.cluster.group_index_of(rank)]
            if here != there:
                link = _slower(self.cluster.link_between(rank, peer), sharing)
            if self._by_library:
                link = library.reached(link, inside=here == there)
            busy_s, latency_s = sent_bytes / link.bytes_per_s, link.latency_s
        out_s, in_s = (self._copy_s(sent_bytes, [self.cluster.device_of(end)]) for end in (rank, peer))
        return factor * (busy_s + out_s), factor * (latency_s + in_s)

    def all_reduce_s(self, ranks: Ranks, reduced_bytes: int) -> float:
        """Return the seconds of `all_reduce`."""
        return self.all_reduce(ranks, reduced_bytes).seconds

    def all_reduce(self, ranks: Ranks, reduced_bytes: int) -> CollectiveTime:
        """Return the time in which every rank gets the sum of `reduced_bytes` over all ranks."""
        spread = self._spread_of(ranks)
        if (measured := self._measured_collective("all_reduce", spread, reduced_bytes)) is not None:
            return measured
        if self._by_library:
            return self._all_reduce_by_library(spread, reduced_bytes).scaled(self._factor)
        one_way = min(self._one_way(spread, reduced_bytes), self._trees(spread, reduced_bytes))
        return self._copied(spread, one_way.scaled(2.0), reduced_bytes, reduced_bytes)

    def _all_reduce_by_library(self, spread: Spread, reduced_bytes: int) -> CollectiveTime:
        """Return the fastest of a ring, of trees and of an addition in the switches of a node."""
        if spread.ranks < 2 or (self.wire.inside == 0.0 and spread.even):
            return self._one_way(spread, reduced_bytes).scaled(2.0)
        ring, trees = self._one_way(spread, reduced_bytes), self._trees(spread, reduced_bytes)
        ring_start_s, trees_start_s = (
            launches * self._launch_s
            for launches in (library.RING_START_LAUNCHES, library.TREE_START_LAUNCHES)
        )
        found = [
            CollectiveTime(2.0 * ring.seconds - ring_start_s, 2.0 * ring.link_s),
            CollectiveTime(2.0 * trees.seconds + trees_start_s, 2.0 * trees.link_s),
        ]
        group = self.cluster.groups[spread.inside[0]] if spread.nodes == 1 else None
        if group is not None and library.adds_in_switch(group, spread.ranks):
            seconds = library.in_switch_s(group.link, self.wire.inside * reduced_bytes, self._launch_s)
            found.append(CollectiveTime(seconds, 0.0))
        return min(found)

    def reduce_scatter(self, ranks: Ranks, total_bytes: int) -> CollectiveTime:
        """Return the time in which every rank gets its share of the sum of `total_bytes`."""
        spread = self._spread_of(ranks)
        if (measured := self._measured_collective("reduce_scatter", spread, total_bytes)) is not None:
            return measured
        return self._copied(
            spread, self._one_way(spread, total_bytes), total_bytes, total_bytes / spread.ranks
        )

    def all_gather(self, ranks: Ranks, total_bytes: int) -> CollectiveTime:
        """Return the time in which every rank gets all `total_bytes` from a share on each rank."""
        spread = self._spread_of(ranks)
        if (measured := self._measured_collective("all_gather", spread, total_bytes)) is not None:
            return measured
        return self._copied(
            spread, self._one_way(spread, total_bytes), total_bytes / spread.ranks, total_bytes
        )

    def half_width(self, ranks: Ranks) -> float:
        """Return the half-width of a collective by its library, or of other than measured ranks."""
        spread = self._spread_of(ranks)
        tables = self._collectives(spread).values()
        if self._by_library and not tables and spread.ranks > 1:
            return library.HALF_WIDTH
        return ranks_half_width({count for one in tables for count in one}, spread.ranks)

    def all_to_all(self, ranks: Ranks, given_bytes: int) -> CollectiveTime:
        """Return the time in which every rank sends each rank an equal part of `given_bytes`."""
        spread = self._spread_of(ranks)
        if spread.ranks < 2:
            return CollectiveTime(0.0, 0.0)
        part, here = given_bytes / spread.ranks, spread.most_on_a_node
        inside_s = max((_slowest_s([link], (here - 1) * part) for link in self._inside(spread)), default=0.0)
        if spread.nodes == 1:
            return self._copied(spread, CollectiveTime(inside_s, 0.0), given_bytes, given_bytes)
        leaving = self._leaving(spread, given_bytes)
        alone = leaving._replace(seconds=max(inside_s, leaving.seconds))
        return self._copied(spread, alone, given_bytes, given_bytes)

    def all_to_all_by_node(self, ranks: Ranks, given_bytes: int) -> CollectiveTime:
        """Return the time of an all-to-all inside the nodes, then between ranks with one place on all nodes.

        The first brings every part to the rank of its node with the receiver's place. Through host memory,
        each of both copies all bytes.
        """
        spread = self._spread_of(ranks)
        if spread.nodes == 1 or spread.most_on_a_node == 1:
            return self.all_to_all(spread, given_bytes)
        here = spread.most_on_a_node
        part = (here - 1) / here * given_bytes
        inside = CollectiveTime(max(_slowest_s([link], part) for link in self._inside(spread)), 0.0)
        first, then = (
            self._copied(spread, one, given_bytes, given_bytes)
            for one in (inside, self._leaving(spread, given_bytes))
        )
        return then._replace(seconds=first.seconds + then.seconds)

    def _leaving(self, spread: Spread, given_bytes: int) -> CollectiveTime:
        """Return the time of the parts of an all-to-all for ranks on other nodes."""
        # All devices of a node send at once, each the parts of the other nodes' ranks.
        here = spread.most_on_a_node
        between = self._between(spread.around, here)
        leaving = (spread.ranks - here) * (given_bytes / spread.ranks)
        return CollectiveTime(_slowest_s(between, leaving), _moving_s(between, leaving))

    def many_to_many(
        self, senders: Sequence[int], receivers: Sequence[int], given_bytes: int
    ) -> CollectiveTime:
        """Return the time in which each sender gives each receiver an equal part of its `given_bytes`.

        Senders and receivers are different ranks. All flows of a node share its links.
        """
        here, there = np.repeat(senders, len(receivers)), np.tile(receivers, len(senders))
        crosses, *links = self.places.leaving_and_entering(here, there)
        part, devices = given_bytes / len(receivers), (here, there)
        # Inside a node, each device has a link of its own.
        inside, between = (
            self._flowing(here[kept], there[kept], [end[kept] for end in ends], part * sent)
            for kept, ends, sent in (
                (~crosses, devices, self.wire.inside),
                (crosses, links, self.wire.between),
            )
        )
        alone = CollectiveTime(max(inside.seconds, between.seconds), between.link_s)
        return self._copied(self.places.spread_of([*senders, *receivers]), alone, given_bytes, given_bytes)

    def _flowing(self, here: Ints, there: Ints, ends: Sequence[Ints], part_bytes: float) -> CollectiveTime:
        """Return the time of flows between ranks, each of `part_bytes`, which share links by their ends."""
        pairs = zip(here.tolist(), there.tolist(), strict=True)
        links = [self._link_between(*pair) for pair in pairs]
        if not links:
            return CollectiveTime(0.0, 0.0)
        shared = np.max([np.bincount(end)[end] for end in ends], axis=0).tolist()
        moving_s = max(n * part_bytes / link.bytes_per_s for n, link in zip(shared, links, strict=True))
        return CollectiveTime(max(link.latency_s for link in links) + moving_s, moving_s)

    def _link_between(self, rank: int, peer: int) -> Link:
        """Return the link between two different ranks, inside a node as the transport uses it."""
        if self.cluster.node_of(rank) == self.cluster.node_of(peer):
            return self._links_inside[self.cluster.group_index_of(rank)]
        return self.cluster.link_between(rank, peer)

    def _measured_collective(self, name: str, spread: Spread, moved_bytes: float) -> CollectiveTime | None:
        tables = self._collectives(spread).get(name)
        if not tables:
            return None
        measured_s = collective_s(tables, spread.ranks, moved_bytes * self.wire.inside)
        return CollectiveTime(measured_s, 0.0).scaled(self._factor)

    def _collectives(self, spread: Spread) -> Mapping[str, Mapping[int, Table]]:
        """Return the tables of collectives by name and number of ranks; none between nodes."""
        machine = self._measured(spread.inside[0]) if spread.nodes == 1 < spread.ranks else None
        return {} if machine is None else machine.collectives

    def _copied(
        self, spread: Spread, alone: CollectiveTime, out_bytes: float, in_bytes: float
    ) -> CollectiveTime:
        """Return a collective with each rank's copies through host memory, as measured steps correct it.

        The slowest device of the cluster decides the copies.
        """
        copied_s = 0.0
        if spread.ranks > 1:
            share = max(self.wire.inside, self.wire.between)
            devices = [group.device for group in self.cluster.groups]
            copied_s = sum(self._copy_s(share * each, devices) for each in (out_bytes, in_bytes))
        return alone._replace(seconds=alone.seconds + copied_s).scaled(self._factor)

    def _copy_s(self, copied_bytes: float, devices: Sequence[Device]) -> float:
        apart = (one for one in devices if self.through_host and not one.synchronous)
        return max((host_copy_s(one, copied_bytes) for one in apart), default=0.0)

    @cached_property
    def _links_inside(self) -> tuple[Link, ...]:
        """The links inside the nodes of each group."""
        return tuple(
            LOOPBACK if self.through_host and not group.device.synchronous else group.link
            for group in self.cluster.groups
        )

    def exchange(self, ranks: Ranks, sent_bytes: int) -> CollectiveTime:
        """Return the time in which two of the ranks, on the slowest link, send each other `sent_bytes`."""
        spread = self._spread_of(ranks)
        if spread.ranks < 2:
            return CollectiveTime(0.0, 0.0)
        between = self._between(spread.around)
        seconds = _slowest_s([*self._inside(spread), *between], sent_bytes)
        alone = CollectiveTime(seconds, _moving_s(between, sent_bytes))
        return self._copied(spread, alone, sent_bytes, sent_bytes)

    @cached_property
    def _by_library(self) -> bool:
        """True if all devices are GPUs that exchange by their own library, not through their hosts."""
        return not self.through_host and not any(one.device.synchronous for one in self.cluster.groups)

    @cached_property
    def _launch_s(self) -> float:
        return max(group.device.launch_s for group in self.cluster.groups)

    @property
    def _factor(self) -> float:
        return self.correction.collectives if self.correction is not None else 1.0

    def _spread_of(self, ranks: Ranks) -> Spread:
        return ranks if isinstance(ranks, Spread) else self.places.spread_of(ranks)

    def _one_way(self, spread: Spread, total_bytes: int) -> CollectiveTime:
        """Return the time of a reduce-scatter or an all-gather, which mirror each other."""
        if spread.ranks < 2:
            return CollectiveTime(0.0, 0.0)
        if self.wire.inside == 0.0 and spread.even:
            return self._hierarchical(spread, total_bytes)
        if self._by_library:
            return self._library_ring(spread, total_bytes)
        flat = self._ring(spread, total_bytes)
        if spread.nodes == 1 or spread.fewest_on_a_node == 1 or not spread.even:
            return flat
        return min(flat, self._hierarchical(spread, total_bytes))

    def _ring(self, spread: Spread, total_bytes: float) -> CollectiveTime:
        """Return the time of (n - 1) turns, each as slow as the slowest link of the ring."""
        between = self._between(spread.around)
        turns, share = spread.ranks - 1, total_bytes / spread.ranks
        turn_s = _slowest_s([*self._inside(spread), *between], share)
        return CollectiveTime(turns * turn_s, turns * _moving_s(between, share))

    def _library_ring(self, spread: Spread, total_bytes: float) -> CollectiveTime:
        """Return the time of a ring with a lane for each network card, by the collective library."""
        inside, between = self._inside(spread), self._between(spread.around)
        inside_s, between_s = (
            max((link.latency_s for link in links), default=0.0) for links in (inside, between)
        )
        moved = total_bytes * (spread.ranks - 1) / spread.ranks
        seconds = library.ring_s(spread.ranks, spread.nodes, inside_s, between_s, self._launch_s)
        return CollectiveTime(seconds + _moving_s([*inside, *between], moved), _moving_s(between, moved))

    def _hierarchical(self, spread: Spread, total_bytes: int) -> CollectiveTime:
        """Return the time inside every node on all bytes, then between nodes on each device's share."""
        on_a_node = spread.most_on_a_node
        share = total_bytes / on_a_node
        inside_s = max(
            ((on_a_node - 1) * _slowest_s([link], share) for link in self._inside(spread)), default=0.0
        )
        # All devices of a node exchange with their twins on the other nodes at once.
        between = self._between(spread.around, on_a_node)
        turns, share = spread.nodes - 1, share / spread.nodes
        return CollectiveTime(
            inside_s + turns * _slowest_s(between, share), turns * _moving_s(between, share)
        )

    def _trees(self, spread: Spread, total_bytes: int) -> CollectiveTime:
        """Return the time of a reduce or a broadcast over two binary trees, each with half of the bytes.

        An inner rank of one tree is a leaf of the other, so each sends and receives all bytes once. The
        source is Sanders et al., Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
        Trees join the ranks of a node before the nodes. With k pieces over `depth` levels, the time is
        (depth + k - 1) (latency + bytes / (k bandwidth)). Here k is the best real number.
        """
        if spread.ranks < 2:
            return CollectiveTime(0.0, 0.0)
        depth = ceil(log2(spread.most_on_a_node)) + ceil(log2(spread.nodes))
        between = self._between(spread.along)
        links = [*self._inside(spread), *between]
        latency_s = max(link.latency_s for link in links)
        moving_s = _moving_s(links, total_bytes)
        on_link_s = _moving_s(between, total_bytes)
        if latency_s == 0.0:
            return CollectiveTime(moving_s, on_link_s)
        pieces = max(1.0, sqrt((depth - 1) * moving_s / latency_s))
        return CollectiveTime((depth + pieces - 1) * (latency_s + moving_s / pieces), on_link_s)

    def _inside(self, spread: Spread) -> list[Link]:
        """Return the links inside the nodes, none if another collective uses them."""
        if self.wire.inside == 0.0:
            return []
        links = [self._links_inside[group] for group in spread.inside]
        if self._by_library:
            links = [library.reached(link, inside=True) for link in links]
        return links if self.wire.inside == 1.0 else [_slower(link, self.wire.inside) for link in links]

    def _between(self, pairs: Sequence[tuple[int, int]], sharing: int = 1) -> list[Link]:
        """Return the links between nodes of pairs of groups, each with its share of them."""
        names = (sorted(self.cluster.groups[group].name for group in pair) for pair in pairs)
        links = [self.cluster.links[one, other] for one, other in names]
        if self._by_library:
            links = [library.reached(link, inside=False) for link in links]
        return [_slower(link, sharing * self.wire.between) for link in links]

    def _measured(self, group: int) -> MachineMeasurement | None:
        """Return the measurements inside the nodes of a group, if any; none are of transfers by a host."""
        machine, device = self.machine, self.cluster.groups[group].device
        other = self.through_host and not device.synchronous
        return machine if machine is not None and machine.device == device.name and not other else None


def _slower(link: Link, factor: float) -> Link:
    return Link(link.bytes_per_s / factor, link.latency_s)


def _slowest_s(links: Sequence[Link], moved_bytes: float) -> float:
    """Return seconds until `moved_bytes` have passed over each of the links; the slowest link decides."""
    return max(link.latency_s for link in links) + _moving_s(links, moved_bytes)


def _moving_s(links: Sequence[Link], moved_bytes: float) -> float:
    """Return seconds in which `moved_bytes` keep the slowest of the links busy; 0 without links."""
    if not links:
        return 0.0
    return moved_bytes / min(link.bytes_per_s for link in links)
