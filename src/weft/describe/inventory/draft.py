"""`ClusterDraft`: a commented CLUSTER.toml from listed nodes, and what it assumes or leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from weft.describe.catalogue import CatalogueEntry, catalogue
from weft.describe.cluster import Link
from weft.describe.cluster_expression import needed_links, slower
from weft.describe.inventory.device_names import devices_named
from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.ports import Port, network_of
from weft.describe.inventory.topology import Topology, bandwidth_inside
from weft.describe.one_line import one_line
from weft.describe.toml_table import Value, key_text, value_text
from weft.describe.units import (
    BYTES,
    BYTES_PER_SECOND,
    SECONDS,
    exact_text,
    parse_bytes,
    parse_bytes_per_second,
    parse_seconds,
)

_NAMES_SHOWN = 4
_NO_NAME = "unknown-gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """The links of a node: the connections of its devices and its ports, where they are known.

    `of` is the device and the count of devices of the node; None when they hold for every node.
    """

    topology: Topology | None = None
    ports: tuple[Port, ...] = ()
    of: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return one_line(self, f"{self.topology}, {len(self.ports)} ports")


@dataclass(frozen=True, kw_only=True)
class GroupDraft:
    """Nodes that are alike, and what is known of them.

    Attributes:
        devices: of one node.
        meant: the devices of the catalogue that the list may mean, most likely first.
        memory_bytes: of the smallest device, where the lists say it.
    """

    name: str
    nodes: tuple[ListedNode, ...]
    devices: int
    meant: tuple[str, ...]
    memory_bytes: int | None
    links: NodeLinks

    def __repr__(self) -> str:
        return one_line(self, f"{self.name}: {len(self.nodes)} nodes of {self.devices} {self.device}")

    @property
    def device(self) -> str:
        return self.meant[0] if self.meant else self.nodes[0].device or _NO_NAME

    @property
    def entry(self) -> CatalogueEntry | None:
        return catalogue().get(self.device)

    @cached_property
    def inside(self) -> tuple[float, str] | None:
        """Bytes/s between devices of a node, in one direction, with the source; None when nothing says it."""
        topology = self.links.topology
        if topology is None or self.entry is None or topology.devices != self.devices:
            return None
        return bandwidth_inside(topology, self.entry)

    @cached_property
    def network(self) -> tuple[Link, str] | None:
        """The network of a node, with the source; None when nothing says it."""
        return network_of(self.links.ports)

    def assumed(self) -> Iterator[str]:
        """Yield what the file assumes about the nodes, with what would tell."""
        said = self.nodes[0].device or "nothing"
        if len(self.meant) > 1:
            others = " or ".join(self.meant[1:])
            yield f"{self.name}: the devices are {self.device}; the list says {said}: or {others} (--device)"
        if self.entry is not None and self.inside is None and self.devices > 1:
            yield f"{self.name}: links inside nodes as usual; `nvidia-smi topo -m` tells (--topology)"
        if self.network is None and len(self.nodes) > 1:
            yield f"{self.name}: the network as usual; `ibstat` tells (--ports)"

    def missing(self) -> Iterator[str]:
        """Yield what a person must fill in."""
        if self.entry is None:
            yield f"{self.name}: the catalogue has no {self.device}; fill in its data sheet, or give --device"


@dataclass(frozen=True, kw_only=True)
class ClusterDraft:
    """A cluster as far as its lists describe it."""

    name: str
    sources: tuple[str, ...]
    groups: tuple[GroupDraft, ...]
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        return one_line(self, f"{self.name}: {len(self.groups)} groups of nodes")

    def __str__(self) -> str:
        return repr(self)

    @property
    def nodes(self) -> int:
        return sum(len(group.nodes) for group in self.groups)

    @property
    def devices(self) -> int:
        return sum(group.devices * len(group.nodes) for group in self.groups)

    @property
    def assumed(self) -> list[str]:
        return [line for group in self.groups for line in group.assumed()]

    @property
    def missing(self) -> list[str]:
        return [line for group in self.groups for line in group.missing()]

    def to_toml(self) -> str:
        """Return the text of the file: keys for what is known, comments for what is assumed."""
        head = [f"# The cluster from {', '.join(self.sources)}; see `weft schema cluster`."]
        head += [f"# Left out: {line}" for line in self.left_out]
        tables = ["\n".join([*head, _line("name", self.name)])]
        tables += ["\n".join(_node_lines(group)) for group in self.groups]
        tables += ["\n".join(lines) for lines in self._links()]
        devices = {group.device: group for group in reversed(self.groups)}
        tables += ["\n".join(lines) for group in devices.values() if (lines := _device_lines(group))]
        return "\n\n".join(tables) + "\n"

    def _links(self) -> Iterator[list[str]]:
        by_name = {group.name: group for group in self.groups}
        for pair in needed_links({group.name: len(group.nodes) for group in self.groups}):
            ends = [by_name[name] for name in dict.fromkeys(pair)]
            known = [end.network for end in ends if end.network is not None]
            usual = [end.entry.network for end in ends if end.entry is not None]
            words = "; ".join(dict.fromkeys(source for _, source in known))
            if len(known) == len(ends):
                link = slower(known[0][0], known[-1][0])
                yield _link_lines(pair, link, "", words)
            elif len(usual) == len(ends):
                yield _link_lines(pair, slower(usual[0], usual[-1]), "# ", "assumed: the usual network")
            else:
                yield _link_lines(pair, None, "", "fill in")


def draft_cluster(
    nodes: Sequence[ListedNode],
    *,
    name: str,
    sources: Sequence[str],
    links: NodeLinks,
    device: str | None = None,
) -> ClusterDraft:
    """Return the draft of a cluster.

    Args:
        sources: names of the lists, for people.
        links: of the nodes.
        device: of the catalogue; for nodes whose devices the list names in no way or in an ambiguous one.
    """
    usable = [node for node in nodes if node.devices and not node.unusable]
    kinds: dict[tuple[tuple[str, ...], str, int], list[ListedNode]] = {}
    for node in usable:
        meant = tuple(devices_named(node.device, node.memory_bytes, node.hints))
        if device is not None and len(meant) != 1 and (not meant or device in meant):
            meant = (device,)
        kinds.setdefault((meant, "" if meant else node.device, node.devices), []).append(node)
    groups: list[GroupDraft] = []
    for (meant, word, count), members in kinds.items():
        kind = meant[0] if meant else word or _NO_NAME
        memories = [node.memory_bytes for node in members if node.memory_bytes is not None]
        groups.append(
            GroupDraft(
                name=_free_name(kind, {group.name for group in groups}),
                nodes=tuple(members),
                devices=count,
                meant=meant,
                memory_bytes=min(memories, default=None),
                links=links if links.of in (None, (kind, count)) else NodeLinks(),
            )
        )
    left_out = tuple(_left_out(nodes))
    return ClusterDraft(name=name, sources=tuple(sources), groups=tuple(groups), left_out=left_out)


def _left_out(nodes: Sequence[ListedNode]) -> Iterator[str]:
    reasons = [
        (node.unusable or "no devices", node.name) for node in nodes if node.unusable or not node.devices
    ]
    for reason, named in groupby(sorted(reasons), key=lambda pair: pair[0]):
        yield f"{_shown([name for _, name in named])} ({reason})"


def _free_name(word: str, taken: set[str]) -> str:
    name, number = word, 2
    while name in taken:
        name, number = f"{word}-{number}", number + 1
    return name


def _node_lines(group: GroupDraft) -> list[str]:
    said, entry = group.nodes[0].device or "nothing", group.entry
    others = f"the list says {said}: or {' or '.join(group.meant[1:])}" if len(group.meant) > 1 else ""
    lines = [
        f"# {_shown([node.name for node in group.nodes])}",
        "[[node]]",
        _line("name", group.name),
        _line("count", len(group.nodes)),
        _line("device", group.device, others),
        _line("devices", group.devices),
    ]
    if group.inside is not None:
        rate, words = group.inside
        lines.append(_line("bandwidth", _rate(rate), words))
    elif entry is not None:
        lines.append("# " + _line("bandwidth", _rate(entry.link.bytes_per_s), "assumed: the usual node"))
    else:
        lines.append('bandwidth = ""  # fill in: per device and direction, such as "32 GB/s"')
        lines.append('latency = ""  # fill in, such as "10 us"')
    return lines


def _link_lines(pair: tuple[str, str], link: Link | None, mark: str, words: str) -> list[str]:
    rate = _rate(link.bytes_per_s, bits=True) if link else ""
    latency = exact_text(link.latency_s, SECONDS, parse_seconds) if link else ""
    lines = [
        "[[link]]",
        _line("between", list(pair)),
        _line("bandwidth", rate, words),
        _line("latency", latency, "as usual" if link else "fill in"),
    ]
    return [mark + line for line in lines]


def _device_lines(group: GroupDraft) -> list[str]:
    entry, memory = group.entry, group.memory_bytes
    text = "" if memory is None else exact_text(memory, BYTES, parse_bytes)
    head = f"[device.{key_text(group.device)}]"
    if entry is None:
        return [
            "# The catalogue has no such device: fill in its data sheet.",
            head,
            _line("memory", text, "" if text else 'fill in, such as "24 GB"'),
            'memory_bandwidth = ""  # fill in, such as "936 GB/s"',
            'flops = { bf16 = "", fp32 = "" }  # fill in: dense peaks, such as "71 TFLOP/s"',
        ]
    if memory is None or memory == entry.device.memory_bytes:
        return []
    return [head, _line("memory", text, "as the driver reports it")]


def _line(key: str, value: Value, comment: str = "") -> str:
    return f"{key} = {value_text(value)}" + (f"  # {comment}" if comment else "")


def _rate(bytes_per_s: float, *, bits: bool = False) -> Value:
    units = {unit: scale for unit, scale in BYTES_PER_SECOND.items() if unit.endswith("bit/s") == bits}
    return exact_text(bytes_per_s, units, parse_bytes_per_second)


def _shown(names: Sequence[str]) -> str:
    """Return a few names and the count of the others."""
    names = list(dict.fromkeys(names))
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
