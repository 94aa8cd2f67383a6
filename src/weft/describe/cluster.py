"""`Cluster`: nodes, devices and links, compact enough for ten thousand devices.

Ranks number the devices: group by group, node by node, device by device.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from weft.describe.device import FP8, Device
from weft.describe.one_line import one_line
from weft.describe.units import counted
from weft.errors import InputError, Violation


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of two devices: bytes/s in one direction, and the latency of an empty message."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """`count` equal nodes of `devices` devices each; `link` joins two devices of one node.

    `speeds` are the speeds of a node's devices relative to `device`; empty when all have its speed.
    `interface` is the network interface for messages between nodes; None leaves the choice to the system.
    """

    name: str
    count: int
    device: Device
    devices: int
    link: Link
    speeds: tuple[float, ...] = ()
    interface: str | None = None

    def __repr__(self) -> str:
        return one_line(
            self, f"{self.name}: {counted(self.count, 'node')} of {self.devices} {self.device.name}"
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Groups of nodes and the links between them.

    `links` maps a sorted pair of group names to the link between two nodes of these groups. The devices of a
    node share its bandwidth. `assumed_inside` names the groups, `assumed_between` the pairs with links that
    nobody stated.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    assumed_inside: frozenset[str] = field(default=frozenset(), compare=False)
    assumed_between: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)

    def __repr__(self) -> str:
        nodes = sum(group.count for group in self.groups)
        return one_line(self, f"{self.name}: {counted(self.ranks, 'device')} in {counted(nodes, 'node')}")

    @cached_property
    def _group_ends(self) -> list[int]:
        return list(accumulate(group.count * group.devices for group in self.groups))

    @property
    def ranks(self) -> int:
        """Count of devices."""
        return self._group_ends[-1]

    def group_index_of(self, rank: int) -> int:
        """Return the index of a rank's group.

        Raises:
            InputError: when the cluster has fewer ranks.
        """
        self._require(rank)
        return bisect.bisect_right(self._group_ends, rank)

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            problem = f"{rank}; {self.name} has ranks 0 to {self.ranks - 1}"
            raise InputError(Violation("rank", problem, str(min(max(rank, 0), self.ranks - 1))))

    def group_of(self, rank: int) -> NodeGroup:
        return self.groups[self.group_index_of(rank)]

    def device_of(self, rank: int) -> Device:
        return self.group_of(rank).device

    def speed_of(self, rank: int) -> float:
        """Return the speed of a rank relative to its `device_of`."""
        index = self.group_index_of(rank)
        group, place = self.groups[index], rank - (self._group_ends[index - 1] if index else 0)
        return group.speeds[place % group.devices] if group.speeds else 1.0

    @property
    def highest_speed(self) -> float:
        """The highest speed of all devices, each relative to its own `device_of`."""
        return max(speed for group in self.groups for speed in group.speeds or (1.0,))

    def node_of(self, rank: int) -> tuple[int, int]:
        """Return (group index, node index inside the group) of a rank.

        Raises:
            InputError: when the cluster has fewer ranks.
        """
        self._require(rank)
        return self._nodes[rank]

    @cached_property
    def _nodes(self) -> tuple[tuple[int, int], ...]:
        """The node of every rank, cached because network models read it often."""
        return tuple(
            (index, node)
            for index, group in enumerate(self.groups)
            for node in range(group.count)
            for _ in range(group.devices)
        )

    def link_between(self, rank: int, other: int) -> Link:
        """Return the link between two different devices.

        Raises:
            InputError: when the cluster has fewer ranks.
        """
        node, other_node = self.node_of(rank), self.node_of(other)
        if node == other_node:
            return self.groups[node[0]].link
        names = sorted((self.groups[node[0]].name, self.groups[other_node[0]].name))
        return self.links[(names[0], names[1])]

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when any data for planners changes."""
        record = {
            "groups": [_record(group) for group in self.groups],
            "links": {" ".join(pair): asdict(link) for pair, link in sorted(self.links.items())},
        }
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _record(group: NodeGroup) -> dict[str, Any]:
    """Return a group's record, the same for `speeds` that are empty and `speeds` that are all 1.

    A host link of the catalogue, the usual reserve and peaks in fp8 are left out. So clusters keep the
    fingerprints of earlier versions.
    """
    record = asdict(group)
    # No plan depends on it.
    del record["interface"]
    if set(group.speeds) <= {1.0}:
        del record["speeds"]
    for name in ("host_bytes_per_s", "reserve_bytes"):
        if record["device"][name] is None:
            del record["device"][name]
    record["device"]["flops_per_s"] = {
        name: peak for name, peak in group.device.flops_per_s.items() if name != FP8
    }
    return record
