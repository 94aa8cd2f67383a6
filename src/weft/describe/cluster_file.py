"""CLUSTER.toml and short names of clusters: people's descriptions of their devices.

The catalogue supplies missing values: the size of a node, the link inside it, and the network between nodes.
The slower of two groups' networks joins them. A device outside the catalogue has no usual node, so its file
must give all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.describe.catalogue import canonical_name, catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_expression import cluster_from_expression, is_expression, needed_links, slower
from weft.describe.cluster_tables import ClusterFile, DeviceTable
from weft.describe.device import Device
from weft.describe.reading import read_toml, violations_of
from weft.describe.this_machine import THIS_MACHINE, this_machine
from weft.describe.units import counted, format_bytes, shown
from weft.errors import InputError, Violation, nearest


def parse_cluster(text: str) -> Cluster:
    """Read a cluster from ``this-machine``, an expression such as ``64xa100-80gb``, or the path of a file.

    Raises:
        InputError: when it is none of these, or the file is invalid; with all violations.
    """
    if text.strip() == THIS_MACHINE:
        return this_machine()
    path = Path(text)
    if path.suffix == ".toml" or _is_file(path):
        return load_cluster(path)
    if is_expression(text):
        return cluster_from_expression(text)
    example = "an expression such as 64xa100-80gb, or the path of a cluster file"
    near = nearest(text, [THIS_MACHINE, *(f"1x{name}" for name in catalogue()), *catalogue()])
    near = f"1x{near}" if near in catalogue() else near
    raise InputError(Violation("cluster", f"{shown(text)} is not {THIS_MACHINE}, {example}", near))


def load_cluster(path: Path | str) -> Cluster:
    """Read the cluster of a CLUSTER.toml.

    Raises:
        InputError: with all mistakes of the file.
    """
    return cluster_of(read_toml(path), str(path))


def cluster_of(record: Mapping[str, Any], where: str) -> Cluster:
    """Build the cluster of a CLUSTER.toml's tables; `where` names the file in messages.

    Raises:
        InputError: with all mistakes of the tables.
    """
    try:
        file = ClusterFile.model_validate(record)
    except ValidationError as error:
        raise InputError(violations_of(error, where, ClusterFile)) from None
    problems: list[Violation] = []
    devices = _devices(file, where, problems)
    groups = _groups(file, devices, where, problems)
    links = _links(file, where, problems)
    if problems:
        raise InputError(problems)
    stated = {tuple(sorted(table.between)) for table in file.link}
    return Cluster(
        name=file.name or Path(where).stem,
        groups=groups,
        links=links,
        assumed_inside=frozenset(node.name for node in file.node if node.bandwidth is None),
        assumed_between=frozenset(links.keys() - stated),
    )


def _devices(file: ClusterFile, where: str, problems: list[Violation]) -> dict[str, Device]:
    """Return the devices of the nodes, with the file's overrides, by their names in the nodes."""
    used = {node.device for node in file.node}
    for name in file.device:
        if name not in used:
            problem = "no node has this device"
            problems.append(Violation(f"{where}: device.{shown(name)}", problem, nearest(name, used)))
    devices = {}
    for name in sorted(used):
        table = file.device.get(name)
        entry = catalogue().get(canonical_name(name))
        if entry is None and table is None:
            problem = f"{shown(name)} is neither in the catalogue nor described in [device.{name}]"
            problems.append(Violation(f"{where}: node.device", problem, nearest(name.lower(), catalogue())))
            continue
        device = _device(name, entry.device if entry else None, table or DeviceTable(), where, problems)
        if device is not None:
            devices[name] = device
    return devices


def _device(
    name: str, known: Device | None, table: DeviceTable, where: str, problems: list[Violation]
) -> Device | None:
    required = {"memory": table.memory, "memory_bandwidth": table.memory_bandwidth, "flops": table.flops}
    missing = [key for key, value in required.items() if value is None]
    if known is None and missing:
        problems += [
            Violation(f"{where}: device.{shown(name)}.{key}", "missing: the catalogue has no such device")
            for key in missing
        ]
        return None
    given: dict[str, Any] = {
        "memory_bytes": table.memory,
        "memory_bytes_per_s": table.memory_bandwidth,
        "reserve_bytes": table.reserve,
        "host_bytes_per_s": table.host_bandwidth,
        "flops_per_s": table.flops,
        "launch_s": table.launch,
        "synchronous": table.synchronous,
        "price_per_hour": table.price_per_hour,
    }
    base = known or Device(name=name, memory_bytes=1, memory_bytes_per_s=1.0)
    device = replace(base, **{key: value for key, value in given.items() if value is not None})
    if device.reserve_bytes is not None and device.reserve_bytes >= device.memory_bytes:
        problem = f"{format_bytes(device.reserve_bytes)} of {format_bytes(device.memory_bytes)} leave nothing"
        problems.append(Violation(f"{where}: device.{shown(name)}.reserve", problem))
    return device


def _groups(
    file: ClusterFile, devices: Mapping[str, Device], where: str, problems: list[Violation]
) -> tuple[NodeGroup, ...]:
    groups = []
    names: set[str] = set()
    for index, node in enumerate(file.node):
        place = f"{where}: node[{index}]"
        if node.name in names:
            problems.append(Violation(f"{place}.name", f"{node.name!r} names two groups of nodes"))
        names.add(node.name)
        entry = catalogue().get(canonical_name(node.device))
        size = node.devices or (entry.devices if entry else None)
        bandwidth = node.bandwidth or (entry.link.bytes_per_s if entry else None)
        latency = node.latency if node.latency is not None else entry.link.latency_s if entry else None
        values = {"devices": size, "bandwidth": bandwidth, "latency": latency}
        problems += [
            Violation(f"{place}.{key}", "missing: the catalogue has no such device")
            for key, value in values.items()
            if value is None
        ]
        speeds = tuple(node.speeds or ())
        if node.speeds is not None and size and len(speeds) != size:
            problem = f"has {counted(len(speeds), 'number')}, but a node has {counted(size, 'device')}"
            problems.append(Violation(f"{place}.speeds", problem))
        if node.device in devices and size and bandwidth and latency is not None:
            groups.append(
                NodeGroup(
                    name=node.name,
                    count=node.count,
                    device=devices[node.device],
                    devices=size,
                    link=Link(bandwidth, latency),
                    speeds=speeds,
                    interface=node.interface,
                )
            )
    return tuple(groups)


def _links(file: ClusterFile, where: str, problems: list[Violation]) -> dict[tuple[str, str], Link]:
    """Return the links of the file, completed by the catalogue's networks."""
    kinds = {node.name: node.device for node in file.node}
    links: dict[tuple[str, str], Link] = {}
    for index, table in enumerate(file.link):
        place = f"{where}: link[{index}].between"
        one, other = sorted(table.between)
        problems += [
            Violation(place, f"{shown(name)} is not a group of nodes", nearest(name, kinds))
            for name in (one, other)
            if name not in kinds
        ]
        if (one, other) in links:
            problems.append(Violation(place, f"{one} and {other} are linked twice"))
        links[one, other] = Link(table.bandwidth, table.latency)
    counts = {node.name: node.count for node in file.node}
    for one, other in needed_links(counts):
        if (one, other) in links:
            continue
        entries = [catalogue().get(canonical_name(kinds[name])) for name in (one, other)]
        known = [entry.network for entry in entries if entry is not None]
        if len(known) < 2:
            problem = f"missing between {one!r} and {other!r}: the catalogue does not know their network"
            problems.append(Violation(f"{where}: link", problem))
        else:
            links[one, other] = slower(*known)
    return links


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False  # too long or malformed for a path
