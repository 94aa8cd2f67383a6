"""Changes of a cluster in a few words: ``inter 25 Gbit/s``, ``+1 node a100-80gb``, ``memory 40 GB``.

A change keeps everything else. A new device stays in the old nodes; new nodes have the devices and links of
the old ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from weft.describe.catalogue import catalogue, find_device
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_expression import MOST_DEVICES, needed_links, slower
from weft.describe.left_out import group_named, without_nodes
from weft.describe.units import counted, parse_bytes, parse_bytes_per_second, shown
from weft.errors import InputError, Violation, nearest

WHERE = "--what-if"
EXAMPLES: Mapping[str, str] = {
    "inter": "inter 25 Gbit/s",
    "intra": "intra 100 GB/s",
    "memory": "memory 40 GB",
    "device": "device h100-80gb",
    "node": "+1 node a100-80gb",
}
_NODES = re.compile(r"([+-])\s*(\d{1,7})\s+nodes?\s+(\S+)", re.ASCII)


def changed_cluster(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster after one change.

    Raises:
        InputError: when the words are none of `EXAMPLES`, or the cluster lacks the part to change.
    """
    nodes = _NODES.fullmatch(text.strip())
    if nodes is not None:
        sign, count, name = nodes.groups()
        change = _with_nodes if sign == "+" else _without_nodes
        changed = change(cluster, int(count), name, text)
    else:
        first, _, rest = text.strip().partition(" ")
        edits: Mapping[str, Callable[[Cluster, str, str], Cluster]] = {
            "inter": _inter,
            "intra": _intra,
            "memory": _memory,
            "device": _device,
        }
        if first not in edits or not rest.strip():
            raise _nonsense(text, first)
        changed = edits[first](cluster, rest.strip(), text)
    return replace(changed, name=f"{cluster.name}, {' '.join(text.split())}")


def _nonsense(text: str, first: str) -> InputError:
    near = nearest(first, EXAMPLES) or ("node" if re.search(r"node|^[+-]", text) else "inter")
    known = ", ".join(f"'{example}'" for example in EXAMPLES.values())
    return _refused(text, f"is no change that is known, such as {known}", EXAMPLES[near])


def _refused(text: str, problem: str, near: str = "") -> InputError:
    return InputError(Violation(WHERE, f"{shown(text)} {problem}", near))


def _inter(cluster: Cluster, quantity: str, text: str) -> Cluster:
    bytes_per_s = parse_bytes_per_second(quantity, f"{WHERE} inter")
    if not any(_between_nodes(cluster, pair) for pair in cluster.links):
        raise _refused(text, f"changes nothing: {cluster.name} is one node", f"intra {quantity}")
    links = {
        pair: replace(link, bytes_per_s=bytes_per_s) if _between_nodes(cluster, pair) else link
        for pair, link in cluster.links.items()
    }
    return replace(cluster, links=links)


def _between_nodes(cluster: Cluster, pair: tuple[str, str]) -> bool:
    """Return True if messages travel there: a group of one node may have a link that joins no two nodes."""
    counts = {group.name: group.count for group in cluster.groups}
    return pair[0] != pair[1] or counts.get(pair[0], 0) > 1


def _intra(cluster: Cluster, quantity: str, text: str) -> Cluster:
    bytes_per_s = parse_bytes_per_second(quantity, f"{WHERE} intra")
    if all(group.devices == 1 for group in cluster.groups):
        raise _refused(text, "changes nothing: every node has one device", f"inter {quantity}")
    return _each_group(
        cluster, lambda group: replace(group, link=replace(group.link, bytes_per_s=bytes_per_s))
    )


def _memory(cluster: Cluster, quantity: str, text: str) -> Cluster:
    memory_bytes = parse_bytes(quantity, f"{WHERE} memory")
    changed = _each_group(
        cluster, lambda group: replace(group, device=replace(group.device, memory_bytes=memory_bytes))
    )
    least = min(group.device.usable_bytes for group in changed.groups)
    if least <= 0:
        raise _refused(text, "leaves no memory beside a device's context", "memory 16 GB")
    return changed


def _device(cluster: Cluster, name: str, text: str) -> Cluster:
    device = find_device(name, f"{WHERE} device").device
    return _each_group(cluster, lambda group: replace(group, device=device))


def _each_group(cluster: Cluster, change: Callable[[NodeGroup], NodeGroup]) -> Cluster:
    return replace(cluster, groups=tuple(change(group) for group in cluster.groups))


def _with_nodes(cluster: Cluster, count: int, name: str, text: str) -> Cluster:
    """Add nodes to a group, or a new group of a device's usual nodes."""
    if not count:
        raise _refused(text, "adds nothing", f"+1 node {name}")
    group = group_named(cluster, name)
    if group is None:
        try:
            entry = find_device(name, WHERE)
        except InputError as error:
            names = ", ".join(one.name for one in cluster.groups)
            near = nearest(name.lower(), [*(one.name for one in cluster.groups), *catalogue()])
            near = f"+{count} node {near}" if near else error.violations[0].nearest
            problem = f"names neither nodes of the cluster ({names}) nor a device of the catalogue"
            raise _refused(text, problem, near) from None
        group = NodeGroup(
            name=entry.device.name, count=0, device=entry.device, devices=entry.devices, link=entry.link
        )
    grown = replace(group, count=group.count + count)
    others = [one for one in cluster.groups if one.name != group.name]
    places = [grown if one.name == group.name else one for one in cluster.groups]
    groups = tuple(places if group.count else [*others, grown])
    if sum(one.count * one.devices for one in groups) > MOST_DEVICES:
        raise _refused(text, f"makes more than {MOST_DEVICES} devices", f"+1 node {name}")
    links = dict(cluster.links)
    for pair in needed_links({one.name: one.count for one in groups}):
        if pair not in links:
            links[pair] = slower(*(_network(cluster, groups, name, text) for name in pair))
    return replace(cluster, groups=groups, links=links)


def _without_nodes(cluster: Cluster, count: int, name: str, text: str) -> Cluster:
    group = group_named(cluster, name)
    if group is None:
        names = [one.name for one in cluster.groups]
        near = nearest(name, names) or names[0]
        raise _refused(text, f"names no nodes of the cluster: {', '.join(names)}", f"-{count} node {near}")
    only = len(cluster.groups) == 1
    most = group.count - only
    if not 1 <= count <= most:
        problem = f"does not leave what can be left: {group.name} has {counted(group.count, 'node')}"
        problem += ", and a cluster needs one" * only
        raise _refused(text, problem, f"-{min(max(count, 1), most)} node {group.name}" if most else "")
    return without_nodes(cluster, group, count)


def _network(cluster: Cluster, groups: tuple[NodeGroup, ...], name: str, text: str) -> Link:
    """Return the outside link of a group's nodes: as described, else the usual, else the slowest known."""
    own = cluster.links.get((name, name))
    if own is not None:
        return own
    device = next(group.device.name for group in groups if group.name == name)
    entry = catalogue().get(device)
    if entry is not None:
        return entry.network
    known = sorted(cluster.links.values(), key=lambda link: (link.bytes_per_s, -link.latency_s))
    if not known:
        raise _refused(text, f"needs a network between nodes, which {cluster.name} does not describe")
    return known[0]
