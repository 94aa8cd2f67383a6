"""Nodes that a job leaves out of its cluster: all of a group, or some of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from weft.describe.catalogue import canonical_name
from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

WHERE = "cluster.without"
_SOME = re.compile(r"(\d{1,7})\s+(\S.*)", re.ASCII)


def without(cluster: Cluster, words: Sequence[str]) -> Cluster:
    """Return the cluster without nodes: ``t4`` are all of a group or of a device, ``2 t4`` are two of them.

    Raises:
        InputError: with every word that names no such nodes, or if no node would be left.
    """
    problems: list[Violation] = []
    left = cluster
    for word in words:
        some = _SOME.fullmatch(word.strip())
        name = some[2] if some else word.strip()
        group = group_named(left, name)
        if group is None:
            names = [one.name for one in left.groups]
            problem = f"{shown(word)} names no nodes of the cluster: {', '.join(names)}"
            problems.append(Violation(WHERE, problem, nearest(name, names)))
            continue
        count = int(some[1]) if some else group.count
        if not 1 <= count <= group.count:
            problem = f"{shown(word)}: {group.name} has {group.count} nodes"
            problems.append(Violation(WHERE, problem, f"{group.count} {group.name}"))
        elif count == group.count and len(left.groups) == 1:
            problems.append(Violation(WHERE, f"{shown(word)} leaves no node of {cluster.name}"))
        else:
            left = without_nodes(left, group, count)
    if problems:
        raise InputError(problems)
    return replace(left, name=f"{cluster.name} without {' and '.join(words)}") if words else cluster


def without_nodes(cluster: Cluster, group: NodeGroup, count: int) -> Cluster:
    """Return the cluster with `count` nodes of a group less, and without the group if none is left."""
    groups = tuple(
        replace(one, count=one.count - count) if one is group else one
        for one in cluster.groups
        if one is not group or one.count > count
    )
    left = {one.name for one in groups}
    return replace(
        cluster,
        groups=groups,
        links={pair: link for pair, link in cluster.links.items() if set(pair) <= left},
        assumed_inside=cluster.assumed_inside & left,
        assumed_between=frozenset(pair for pair in cluster.assumed_between if set(pair) <= left),
    )


def group_named(cluster: Cluster, name: str) -> NodeGroup | None:
    """Return the group with this name, else the first one with this device."""
    by_name = (group for group in cluster.groups if group.name == name)
    by_device = (group for group in cluster.groups if group.device.name == canonical_name(name))
    return next(by_name, None) or next(by_device, None)
