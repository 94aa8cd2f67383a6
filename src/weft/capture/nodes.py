"""Measurement of the links between real nodes: one rank for each device, on every node at once.

In every round of a tournament each node exchanges messages with another, all its devices with the other's. So
a slow link shows beside its peers, and devices share their node's ports as they do in training.
"""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from weft.capture.machine import messages_at_once
from weft.describe.catalogue import canonical_name
from weft.describe.cluster import Cluster, Link
from weft.describe.one_line import one_line
from weft.describe.this_machine import this_machine
from weft.errors import InputError, Violation
from weft.progress import CountedWork, ProgressReport, unwatched
from weft.run.launch.worker_start import WorkerContext

# The first tells the latency, the others the rate.
SIZES = {"cpu": (0, 2**22), "cuda": (0, 2**26)}
# In medians of the links of one pair of groups: a link below it is named.
SLOW = 0.7
_TEXT_BYTES = 512
_HOST = 64


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """A node that takes part: its host, the ranks of its devices, and its group in the cluster."""

    host: str
    ranks: tuple[int, ...]
    group: str

    def __repr__(self) -> str:
        return one_line(self, f"{self.host}: {len(self.ranks)} ranks of {self.group}")


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between two nodes, or between the devices of one, in one direction."""

    nodes: tuple[MeasuredNode, MeasuredNode]
    link: Link

    def __repr__(self) -> str:
        return one_line(self, f"{self.words}: {self.link.bytes_per_s:.3g} bytes/s")

    @property
    def is_inside(self) -> bool:
        return self.nodes[0] is self.nodes[1]

    @property
    def pair(self) -> tuple[str, str]:
        one, other = sorted(node.group for node in self.nodes)
        return one, other

    @property
    def words(self) -> str:
        hosts = list(dict.fromkeys(node.host for node in self.nodes))
        return f"inside {hosts[0]}" if self.is_inside else " - ".join(hosts)


@dataclass(frozen=True)
class MeasuredNodes:
    """The cluster with the medians of the measured links, and every link."""

    cluster: Cluster
    links: tuple[MeasuredLink, ...]

    def __repr__(self) -> str:
        return one_line(self, f"{self.cluster.name}: {len(self.links)} links")

    @property
    def slow(self) -> list[MeasuredLink]:
        """The links far below the median of their like."""
        return [one for one in self.links if one.link.bytes_per_s < SLOW * self._usual(one).bytes_per_s]

    def _usual(self, one: MeasuredLink) -> Link:
        if one.is_inside:
            return next(group.link for group in self.cluster.groups if group.name == one.pair[0])
        return self.cluster.links[one.pair]


def measure_nodes(
    cluster: Cluster, context: WorkerContext, report: ProgressReport = unwatched
) -> MeasuredNodes:
    """Measure the links of the nodes whose ranks have joined; every rank calls it and gets the result.

    Raises:
        InputError: on every rank, if a node is of no group of the cluster.
    """
    nodes = _nodes(cluster, context)
    device = torch.device(context.device)
    rounds = [[(node, node) for node in nodes], *tournament(nodes)]
    counted = CountedWork(report, "links", len(rounds), "rounds")
    links = [link for pairs in counted.each(rounds) for link in _measured(pairs, device)]
    return MeasuredNodes(with_medians(cluster, links), tuple(links))


def tournament(nodes: Sequence[MeasuredNode]) -> Iterator[list[tuple[MeasuredNode, MeasuredNode]]]:
    """Yield rounds in which no node is in two pairs; all rounds together have every pair once."""
    seats: list[MeasuredNode | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(one, other) for one, other in met if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def with_medians(cluster: Cluster, links: Sequence[MeasuredLink]) -> Cluster:
    """Return the cluster with the median link of every group and every pair of groups among `links`."""
    inside: dict[str, list[Link]] = {}
    between: dict[tuple[str, str], list[Link]] = {}
    for one in links:
        (inside.setdefault(one.pair[0], []) if one.is_inside else between.setdefault(one.pair, [])).append(
            one.link
        )
    groups = tuple(
        replace(group, link=_median(inside[group.name])) if group.name in inside else group
        for group in cluster.groups
    )
    found = {pair: _median(links) for pair, links in between.items()}
    return replace(
        cluster,
        groups=groups,
        links={**cluster.links, **found},
        assumed_inside=cluster.assumed_inside - inside.keys(),
        assumed_between=cluster.assumed_between - found.keys(),
    )


def _median(links: Sequence[Link]) -> Link:
    rates, latencies = ([link.bytes_per_s for link in links], [link.latency_s for link in links])
    return Link(statistics.median(rates), statistics.median(latencies))


def _nodes(cluster: Cluster, context: WorkerContext) -> list[MeasuredNode]:
    """Return the nodes in the order of their ranks; a rank with the local number 0 begins one."""
    here = this_machine().groups[0]
    texts = _texts_of_all([socket.gethostname()[:_HOST], here.device.name, str(context.local_rank)])
    starts = [rank for rank, (*_, local) in enumerate(texts) if local == "0"]
    nodes, problems = [], []
    for start, end in zip(starts, [*starts[1:], len(texts)], strict=True):
        host, kind, _ = texts[start]
        groups = [group for group in cluster.groups if canonical_name(group.device.name) == kind]
        if not groups:
            kinds = ", ".join(group.device.name for group in cluster.groups)
            problems.append(
                Violation(cluster.name, f"{host} has devices of kind {kind}; the file has {kinds}")
            )
            continue
        size = end - start
        group = next((group for group in groups if group.devices == size), groups[0])
        nodes.append(MeasuredNode(host, tuple(range(start, end)), group.name))
    if problems:
        raise InputError(problems)
    return nodes


def _measured(pairs: Sequence[tuple[MeasuredNode, MeasuredNode]], device: torch.device) -> list[MeasuredLink]:
    """Return the links of pairs of nodes that exchange messages at the same time."""
    ways = {pair: _ways(pair) for pair in pairs}
    sizes = SIZES[device.type]
    timings = messages_at_once([way for found in ways.values() for way in found], device, sizes)
    own = torch.tensor([timing.seconds for _, timing in timings], dtype=torch.float64)
    seconds = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64)
    dist.all_gather(list(seconds), own)
    found = []
    for pair, used in ways.items():
        if not used:
            continue  # a node of one device has no links inside
        empty_s, largest_s = seconds[[rank for way in used for rank in way]].amax(0).tolist()
        rate = sizes[-1] / max(largest_s - empty_s, 1e-9)
        # A node's devices share its network, and each has its own link inside.
        shared = 1 if pair[0] is pair[1] else len(used)
        found.append(MeasuredLink(pair, Link(_three_digits(rate * shared), _three_digits(empty_s))))
    return found


def _three_digits(value: float) -> float:
    """Return a measured value without the digits that the next measurement changes."""
    return float(f"{value:.3g}")


def _ways(pair: tuple[MeasuredNode, MeasuredNode]) -> list[tuple[int, int]]:
    one, other = pair
    if one is not other:
        return list(zip(one.ranks, other.ranks, strict=False))
    return list(zip(one.ranks[::2], one.ranks[1::2], strict=False))


def _texts_of_all(words: Sequence[str]) -> list[list[str]]:
    """Return the words of every rank, by rank."""
    text = json.dumps(words).encode()
    own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    found = torch.zeros(dist.get_world_size(), _TEXT_BYTES, dtype=torch.uint8)
    dist.all_gather(list(found), own)
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in found]
