"""Expressions such as ``8xa100-80gb+16xv100-16gb``: counted devices in their usual nodes and network.

Each term becomes whole nodes of the device's usual size with its usual network. A term smaller than a node is
a part of one node. Any other count must fill its nodes. A partly used node is a separate group and needs a
separate term (``64xa100-80gb+4xa100-80gb``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations_with_replacement

from weft.describe.catalogue import CatalogueEntry, find_device
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.errors import InputError, Violation

# Rank counts are 64-bit integers; no cluster is near this limit.
MOST_DEVICES = 10**6

_TERM = r"\s*\d+\s*[xX*]\s*[A-Za-z][\w.-]*\s*"
_EXPRESSION = re.compile(rf"{_TERM}(?:\+{_TERM})*", re.ASCII)


def is_expression(text: str) -> bool:
    """Return True if `text` is a sum of counted names, known or unknown."""
    return _EXPRESSION.fullmatch(text) is not None


def cluster_from_expression(text: str) -> Cluster:
    """Build the cluster of an expression.

    Raises:
        InputError: with every term that has an unknown device or a count that does not fill its nodes.
    """
    problems: list[Violation] = []
    groups: list[NodeGroup] = []
    entries: dict[str, CatalogueEntry] = {}
    for term in text.split("+"):
        digits, _, word = re.sub(r"[X*]", "x", re.sub(r"\s", "", term), count=1).partition("x")
        try:
            entry = find_device(word, f"cluster {text}")
            group = _term_group(digits, entry, text, {known.name for known in groups})
        except InputError as error:
            problems += error.violations
            continue
        groups.append(group)
        entries[group.name] = entry
    if problems:
        raise InputError(problems)
    networks = {name: entry.network for name, entry in entries.items()}
    pairs = needed_links({group.name: group.count for group in groups})
    return Cluster(
        name=re.sub(r"\s", "", text),
        groups=tuple(groups),
        links={pair: slower(networks[pair[0]], networks[pair[1]]) for pair in pairs},
        assumed_inside=frozenset(networks),
        assumed_between=frozenset(pairs),
    )


def _term_group(digits: str, entry: CatalogueEntry, text: str, taken: set[str]) -> NodeGroup:
    where, device, size = f"cluster {text}", entry.device, entry.devices
    # Check the length before the conversion: Python refuses to convert very long numbers.
    count = int(digits) if len(digits.lstrip("0")) <= 7 else MOST_DEVICES + 1
    if not 1 <= count <= MOST_DEVICES:
        near = f"1x{device.name}" if count < 1 else f"{MOST_DEVICES // size * size}x{device.name}"
        raise InputError(Violation(where, f"{digits[:20]} devices; 1 to {MOST_DEVICES} are allowed", near))
    if count > size and count % size:
        rest = count % size
        problem = f"{count} {device.name} do not fill nodes of {size}; add the partly used node as a term"
        near = f"{count - rest}x{device.name}+{rest}x{device.name}"
        raise InputError(Violation(where, problem, near))
    name, number = device.name, 2
    while name in taken:
        name, number = f"{device.name}-{number}", number + 1
    return NodeGroup(
        name=name, count=max(1, count // size), device=device, devices=min(count, size), link=entry.link
    )


def needed_links(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return sorted pairs of groups with messages between their nodes, from the node counts by group."""
    return [
        (one, other)
        for one, other in combinations_with_replacement(sorted(counts), 2)
        if one != other or counts[one] > 1
    ]


def slower(one: Link, other: Link) -> Link:
    """Return the link between two different networks: the lower bandwidth and the higher latency."""
    return Link(min(one.bytes_per_s, other.bytes_per_s), max(one.latency_s, other.latency_s))
