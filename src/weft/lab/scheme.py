"""`Scheme`: a lab's emulation of a cluster, as plain numbers; this module does not touch the system.

Every rank is one process of one thread on one core. The fastest devices of the file get `share` of a core,
slower devices get `share` times their relative speed. The devices of a core together get at most `CORE_LOAD`
of it. The kernel's network, the agent and the launcher use the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from weft.describe.cluster import Cluster
from weft.describe.units import format_seconds
from weft.errors import InputError, Violation

PREFIX = "weft-lab-"
# The same name in the namespace of every node.
INTERFACE = "weft0"
HUB_ADDRESS = "10.213.0.254"
NETWORK_BITS = 24

CORE_LOAD = 0.9
MOST_RANKS = 16
# Only rates are emulated: latencies above this would differ from the file.
LONGEST_LATENCY_S = 1e-3
# The kernel accepts no quota under a millisecond; short periods keep steps even.
PERIOD_US, LEAST_QUOTA_US, LONGEST_PERIOD_US = 5_000, 1_000, 1_000_000


@dataclass(frozen=True, slots=True)
class RankScheme:
    """One device: its node, its speed relative to the fastest, its part of a core, and its core."""

    node: int
    relative_speed: float
    quota: float
    core: int


@dataclass(frozen=True, slots=True)
class NodeScheme:
    """One node; `rates` are bytes/s to each node in one direction, 0.0 to itself."""

    name: str
    namespace: str
    address: str
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Bytes/s of the node's interface in one direction: the rate of its fastest link."""
        return max(self.rates)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A cluster's nodes and ranks, in the cluster's order; `share` is the fastest device's part of a core."""

    pid: int
    share: float
    nodes: tuple[NodeScheme, ...]
    ranks: tuple[RankScheme, ...]

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.pid}"

    @property
    def hub(self) -> str:
        """The namespace of the bridge that joins the nodes."""
        return f"{self.name}-hub"

    def ranks_on(self, node: int) -> list[int]:
        return [rank for rank, place in enumerate(self.ranks) if place.node == node]


def scheme_of(cluster: Cluster, cores: Sequence[int], pid: int) -> Scheme:
    """Build the scheme that emulates a cluster on these cores, under names with `pid`.

    Raises:
        InputError: with all properties that a lab cannot emulate.
    """
    if problems := _problems(cluster):
        raise InputError(problems)
    names = list(dict.fromkeys(cluster.node_of(rank) for rank in range(cluster.ranks)))
    node_of = [names.index(cluster.node_of(rank)) for rank in range(cluster.ranks)]
    first = [node_of.index(node) for node in range(len(names))]
    nodes = tuple(
        NodeScheme(
            name=f"{cluster.groups[group].name}-{index}",
            namespace=f"{PREFIX}{pid}-{node}",
            address=f"10.213.0.{node + 1}",
            rates=tuple(
                0.0 if other == node else cluster.link_between(first[node], first[other]).bytes_per_s
                for other in range(len(names))
            ),
        )
        for node, (group, index) in enumerate(names)
    )
    speeds = relative_speeds(cluster)
    share, core_of = shared_cores(speeds, len(cores))
    ranks = tuple(
        RankScheme(node, speed, share * speed, cores[core])
        for node, speed, core in zip(node_of, speeds, core_of, strict=True)
    )
    return Scheme(pid=pid, share=share, nodes=nodes, ranks=ranks)


def relative_speeds(cluster: Cluster) -> list[float]:
    """Return every rank's fp32 flops of its device times its own speed, relative to the fastest rank."""
    flops = [
        cluster.device_of(rank).flops_per_s["fp32"] * cluster.speed_of(rank) for rank in range(cluster.ranks)
    ]
    return [one / max(flops) for one in flops]


def shared_cores(speeds: Sequence[float], cores: int) -> tuple[float, list[int]]:
    """Return the part of a core for speed 1, and the core of each rank.

    The fastest ranks go first, each to the core with the smallest load. Then one factor slows all ranks down
    until the fullest core has `CORE_LOAD`. No quota is above `CORE_LOAD` of a core: a rank has one thread.
    """
    loads = [0.0] * cores
    core_of = [0] * len(speeds)
    for rank in sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank)):
        core = loads.index(min(loads))
        loads[core] += speeds[rank]
        core_of[rank] = core
    return CORE_LOAD / max(1.0, *loads), core_of


def quota_and_period_us(quota: float) -> tuple[int, int]:
    """Return the kernel's quota and period (us) for a part of a core; small quotas have periods over 5 ms."""
    period_us = max(PERIOD_US, ceil(LEAST_QUOTA_US / quota))
    return max(LEAST_QUOTA_US, round(quota * period_us)), period_us


def least_rates(rates: Sequence[float]) -> list[float]:
    """Return the guaranteed bytes/s of each of a node's links when all are busy.

    Their sum is the interface's rate. A link also uses the rest that other links leave, up to its own rate.
    """
    total = sum(rates)
    return [max(rates) * rate / total if total else 0.0 for rate in rates]


def pid_of(name: str) -> int | None:
    """Return the process number in the name of a lab's namespace or control group; None for other names."""
    found = re.fullmatch(rf"{PREFIX}(\d+)(-\w+)?", name)
    return int(found[1]) if found else None


def _problems(cluster: Cluster) -> list[Violation]:
    where = f"lab of {cluster.name}"
    if cluster.ranks > MOST_RANKS:
        return [
            Violation(where, f"{cluster.ranks} devices; a lab runs one process for each", f"{MOST_RANKS}")
        ]
    problems = [
        Violation(f"{where}: {group.name}", f"{group.device.name} has no fp32 flops to compare speeds by")
        for group in cluster.groups
        if "fp32" not in group.device.flops_per_s
    ]
    problems += [
        Violation(
            f"{where}: link {one} - {other}",
            f"latency {format_seconds(link.latency_s)} cannot be emulated, only bandwidths are",
            format_seconds(LONGEST_LATENCY_S),
        )
        for (one, other), link in sorted(cluster.links.items())
        if link.latency_s > LONGEST_LATENCY_S
    ]
    if not problems:
        slowest = min(relative_speeds(cluster))
        share, _ = shared_cores(relative_speeds(cluster), 1)
        least = LEAST_QUOTA_US / LONGEST_PERIOD_US
        if slowest * share < least:
            problem = (
                f"the slowest device has {slowest:.2g} of the fastest one's speed, too little for a quota"
            )
            problems.append(Violation(where, problem, f"{least / share:.2g}"))
    return problems
