"""Links that nobody stated: their words, and the cluster with half of their bandwidth."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from weft.describe.catalogue import canonical_name, catalogue
from weft.describe.cluster import Cluster, Link
from weft.describe.units import format_bytes, format_seconds
from weft.predict.measurements import Measurements


@dataclass(frozen=True, slots=True)
class AssumedLinks:
    """Assumed links of one kind; `key` names them among assumptions, `halved` has half their bandwidth."""

    key: str
    words: str
    halved: Cluster


def assumed_links(cluster: Cluster, measured: Measurements) -> list[AssumedLinks]:
    """Return the links that plans use and nobody stated or measured: those between nodes first."""
    found = []
    joined = {group.name for group in cluster.groups if group.count > 1}
    used = {pair: link for pair, link in cluster.links.items() if pair[0] != pair[1] or pair[0] in joined}
    pairs = {pair: link for pair, link in used.items() if pair in cluster.assumed_between}
    if pairs:
        named = {" - ".join(dict.fromkeys(pair)): link for pair, link in pairs.items()}
        ends = {name for pair in pairs for name in pair}
        listed = _listed(named, others_stated=len(pairs) < len(used))
        words = f"{listed} per node, {_source(cluster, ends)}"
        halved = {pair: _half(link) if pair in pairs else link for pair, link in cluster.links.items()}
        found.append(AssumedLinks("network_between_nodes", words, replace(cluster, links=halved)))
    within = {group.name: group.link for group in cluster.groups if group.devices > 1}
    inside = {name: link for name, link in within.items() if name in cluster.assumed_inside}
    if inside and not (measured.machine is not None and measured.machine.message):
        listed = _listed(inside, others_stated=len(inside) < len(within))
        words = f"{listed} per device, {_source(cluster, inside)}"
        groups = tuple(
            replace(group, link=_half(group.link)) if group.name in inside else group
            for group in cluster.groups
        )
        found.append(AssumedLinks("links_inside_nodes", words, replace(cluster, groups=groups)))
    return found


def _half(link: Link) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s / 2)


def _listed(links: Mapping[str, Link], *, others_stated: bool) -> str:
    """Return the links in words: equal ones once and without names, unless others were stated."""
    texts = {
        name: f"{format_bytes(link.bytes_per_s)}/s and {format_seconds(link.latency_s)}"
        for name, link in links.items()
    }
    if len(set(texts.values())) == 1 and not others_stated:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _source(cluster: Cluster, groups: Collection[str]) -> str:
    """Return the origin of assumed links of some groups: the catalogue, or a guess for other devices."""
    names = dict.fromkeys(group.device.name for group in cluster.groups if group.name in groups)
    known = [name for name in names if canonical_name(name) in catalogue()]
    return f"usual for {', '.join(known)}" if known else "until `weft measure`"
