"""Nodes and single devices that a job leaves out of its cluster."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import NamedTuple

from weft.describe.catalogue import canonical_name
from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.units import counted, shown
from weft.errors import InputError, Violation, nearest

WHERE = "cluster.without"
_SOME = re.compile(r"(\d{1,7})\s+(\S.*)", re.ASCII)
_DEVICE = re.compile(r"device\s*(\d{1,7})", re.ASCII)


class Remaining(NamedTuple):
    """The rest of a cluster, and the rank in the whole cluster of each of its devices, rising."""

    cluster: Cluster
    ranks: tuple[int, ...]


def without(cluster: Cluster, words: Sequence[str]) -> Cluster:
    """Return the cluster without nodes or devices; see `remaining`.

    Raises:
        InputError: as `remaining` does.
    """
    return remaining(cluster, words).cluster


def remaining(cluster: Cluster, words: Sequence[str]) -> Remaining:
    """Return the cluster without nodes or devices, and the former ranks of its devices.

    ``t4`` are all nodes of a group or of a device, and ``2 t4`` are two of them. ``device 2`` is the device
    of this rank in the whole cluster. A group of this name comes first.

    Raises:
        InputError: with every word that names nothing that is there, or if nothing would be left.
    """
    problems: list[Violation] = []
    left = list(range(cluster.ranks))
    for word in words:
        try:
            named = _named(cluster, left, word)
        except InputError as error:
            problems += error.violations
            continue
        if len(named) == len(left):
            problems.append(Violation(WHERE, f"{shown(word)} leaves no node of {cluster.name}"))
        else:
            left = [rank for rank in left if rank not in named]
    if problems:
        raise InputError(problems)
    if not words:
        return Remaining(cluster, tuple(left))
    name = f"{cluster.name} without {' and '.join(words)}"
    return Remaining(replace(keeping(cluster, left), name=name), tuple(left))


def _named(cluster: Cluster, left: Sequence[int], word: str) -> Collection[int]:
    """Return the ranks of the whole cluster that a word names among those left."""
    groups = list(dict.fromkeys(cluster.group_index_of(rank) for rank in left))
    names = [cluster.groups[index].name for index in groups]
    some, device = _SOME.fullmatch(word.strip()), _DEVICE.fullmatch(word.strip())
    if device is not None and word.strip() not in names:
        return _device(cluster, left, word, int(device[1]))
    name = some[2] if some else word.strip()
    group = group_named(replace(cluster, groups=tuple(cluster.groups[index] for index in groups)), name)
    if group is None:
        problem = f"{shown(word)} names no nodes of the cluster: {', '.join(names)}"
        raise InputError(Violation(WHERE, problem, nearest(name, names)))
    nodes = [
        list(ranks)
        for node, ranks in groupby(left, key=cluster.node_of)
        if cluster.groups[node[0]].name == group.name
    ]
    asked = int(some[1]) if some else len(nodes)
    if not 1 <= asked <= len(nodes):
        problem = f"{shown(word)}: {group.name} has {counted(len(nodes), 'node')}"
        raise InputError(Violation(WHERE, problem, f"{len(nodes)} {group.name}"))
    return {rank for node in nodes[-asked:] for rank in node}


def _device(cluster: Cluster, left: Sequence[int], word: str, rank: int) -> Collection[int]:
    last = cluster.ranks - 1
    if rank > last:
        problem = f"{shown(word)}: {cluster.name} has devices 0 to {last}"
        raise InputError(Violation(WHERE, problem, f"device {last}"))
    if rank not in left:
        raise InputError(Violation(WHERE, f"{shown(word)} is left out already"))
    return {rank}


def without_nodes(cluster: Cluster, group: NodeGroup, count: int) -> Cluster:
    """Return the cluster with `count` nodes of a group less, and without the group if none is left."""
    index = cluster.groups.index(group)
    gone = range(group.count - count, group.count)
    nodes = map(cluster.node_of, range(cluster.ranks))
    return keeping(
        cluster, [rank for rank, (at, node) in enumerate(nodes) if at != index or node not in gone]
    )


def keeping(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """Return the cluster with these devices alone, in their order and with their links.

    Neighbouring nodes of a group that keep the same devices form a group. The first of several has the old
    name, and each other one a number behind it.
    """
    pieces: dict[str, list[NodeGroup]] = {}
    taken = {group.name for group in cluster.groups}
    for group, nodes in _kept_places(cluster, ranks):
        before = pieces.setdefault(group.name, [])
        for places, alike in groupby(nodes):
            name = group.name if not before else _free_name(group.name, taken)
            taken.add(name)
            speeds = tuple(group.speeds[place] for place in places) if group.speeds else ()
            count_alike = len(list(alike))
            before.append(replace(group, name=name, count=count_alike, devices=len(places), speeds=speeds))
    names = {old: [piece.name for piece in found] for old, found in pieces.items()}
    return replace(
        cluster,
        groups=tuple(piece for found in pieces.values() for piece in found),
        links={pair: link for old, link in cluster.links.items() for pair in _pairs(names, old)},
        assumed_inside=frozenset(name for old in cluster.assumed_inside for name in names.get(old, ())),
        assumed_between=frozenset(pair for old in cluster.assumed_between for pair in _pairs(names, old)),
    )


def _kept_places(cluster: Cluster, ranks: Sequence[int]) -> Iterator[tuple[NodeGroup, list[tuple[int, ...]]]]:
    """Yield groups, with the places of the kept devices in each of their nodes that keeps any."""
    first = 0
    by_node = [(node, list(kept)) for node, kept in groupby(ranks, key=cluster.node_of)]
    for index, group in enumerate(cluster.groups):
        mine = [kept for node, kept in by_node if node[0] == index]
        if mine:
            yield group, [tuple((rank - first) % group.devices for rank in kept) for kept in mine]
        first += group.count * group.devices


def _free_name(name: str, taken: Collection[str]) -> str:
    return next(free for number in count(2) if (free := f"{name}-{number}") not in taken)


def _pairs(names: dict[str, list[str]], old: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the sorted pairs of new groups that the link of two old ones joins."""
    for one in names.get(old[0], ()):
        for other in names.get(old[1], ()):
            yield (one, other) if one <= other else (other, one)


def group_named(cluster: Cluster, name: str) -> NodeGroup | None:
    """Return the group with this name, else the first one with this device."""
    by_name = (group for group in cluster.groups if group.name == name)
    by_device = (group for group in cluster.groups if group.device.name == canonical_name(name))
    return next(by_name, None) or next(by_device, None)
