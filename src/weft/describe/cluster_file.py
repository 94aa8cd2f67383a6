"""Clusters from words and files: `64xa100-80gb`, `8xa100-80gb+16xv100-16gb`, `this-machine`, a CLUSTER.toml."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.catalogue import CatalogueEntry, catalogue, get_device
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import PRECISION_BYTES, Device
from weft.describe.this_machine import this_machine
from weft.describe.toml_file import read_toml, validate
from weft.describe.units import (
    parse_bytes,
    parse_bytes_per_second,
    parse_flops_per_second,
    parse_seconds,
)
from weft.errors import InputError, Violation, nearest

Quantity = str | float
Count = Annotated[int, Field(ge=1, strict=True)]

_EXPRESSION = re.compile(r"\s*(\d+)\s*x\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeTable(_Table):
    """[[node]]: `count` equal nodes. Bandwidth and latency default to the device's usual node."""

    name: str = Field(min_length=1, description="of the group of nodes")
    count: Count = Field(1, description="how many such nodes")
    device: str = Field(description="from the catalogue, or from [device.NAME]")
    devices: Count = Field(description="per node")
    bandwidth: Quantity | None = Field(None, description="between two devices of a node, one direction")
    latency: Quantity | None = Field(None, description="between two devices of a node")


class LinkTable(_Table):
    """[[link]]: between two groups of nodes, or between the nodes of one group."""

    between: tuple[str, str] = Field(description="two names of node groups, or one twice")
    bandwidth: Quantity = Field(description="of a node, one direction")
    latency: Quantity = Field(description="of an empty message")


class DeviceTable(_Table):
    """[device.NAME]: overrides a device of the catalogue, or describes a new one."""

    memory: Quantity | None = Field(None, description="capacity")
    memory_bandwidth: Quantity | None = Field(None, description="peak")
    flops: Mapping[str, Quantity] | None = Field(None, description="dense peak by precision")
    launch: Quantity | None = Field(None, description="host time per kernel")
    synchronous: bool | None = Field(None, description="the host computes itself")
    price_per_hour: float | None = Field(None, gt=0, lt=float("inf"), description="in your currency")


class ClusterTables(_Table):
    """CLUSTER.toml"""

    name: str = Field(min_length=1)
    node: tuple[NodeTable, ...] = Field(min_length=1)
    link: tuple[LinkTable, ...] = ()
    device: Mapping[str, DeviceTable] = Field(default_factory=dict)


def parse_cluster(text: str) -> Cluster:
    """`this-machine`, a sum of COUNTxDEVICE, or the path of a CLUSTER.toml.

    Devices come in the catalogue's usual nodes; a count that does not fill its last node ends in a smaller
    one. Two groups are joined by the slower of their networks.

    Raises:
        InputError: for an unknown device, a broken file, or text that is none of these.
    """
    if text == "this-machine":
        return this_machine()
    parts = [_EXPRESSION.fullmatch(part) for part in text.split("+")]
    if all(parts):
        counts = [(int(part[1]), part[2]) for part in parts if part is not None]
        return _expression(text, counts)
    if text.endswith(".toml") or Path(text).is_file():
        return load_cluster(Path(text))
    raise InputError(
        Violation(
            "cluster",
            f"{text!r} is not this-machine, an expression such as 64xa100-80gb, or a CLUSTER.toml",
            nearest(text, ("this-machine", *(f"8x{name}" for name in catalogue()))),
        )
    )


def _expression(text: str, counts: list[tuple[int, str]]) -> Cluster:
    groups: list[NodeGroup] = []
    networks: list[Link] = []
    for index, (count, name) in enumerate(counts):
        if count < 1:
            raise InputError(Violation("cluster", f"{text!r}: a count must be at least 1", "1"))
        entry = get_device(name, f"cluster {text!r}")
        whole, rest = divmod(count, entry.devices_per_node)
        suffix = f"-{index}" if sum(other == name for _, other in counts) > 1 else ""
        for nodes, devices, last in ((whole, entry.devices_per_node, ""), (1 if rest else 0, rest, "-rest")):
            if nodes:
                groups.append(
                    NodeGroup(
                        name=name + suffix + last,
                        count=nodes,
                        device=entry.device,
                        devices=devices,
                        link=entry.link,
                    )
                )
                networks.append(entry.network)
    return Cluster(name=text.replace(" ", ""), groups=tuple(groups), links=_all_pairs(groups, networks))


def _all_pairs(groups: list[NodeGroup], networks: list[Link]) -> dict[tuple[str, str], Link]:
    links = {}
    for index, group in enumerate(groups):
        for other in range(index, len(groups)):
            ends = networks[index], networks[other]
            names = sorted((group.name, groups[other].name))
            links[names[0], names[1]] = Link(
                min(end.bytes_per_s for end in ends), max(end.latency_s for end in ends)
            )
    return links


def load_cluster(path: Path) -> Cluster:
    """Read a CLUSTER.toml. A link that is not given is the network of the devices' usual nodes.

    Raises:
        InputError: with every violation.
    """
    return cluster_from_tables(read_toml(path), str(path))


def cluster_from_tables(record: Mapping[str, Any], where: str = "") -> Cluster:
    """A cluster from the tables of a CLUSTER.toml.

    Raises:
        InputError: with every violation.
    """
    tables = validate(ClusterTables, record, where)
    problems: list[Violation] = []
    entries = _devices(tables, where, problems)
    names = [node.name for node in tables.node]
    problems += [
        Violation(f"{where}: node {name}", "two groups of nodes have this name")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    groups = [
        _collect(problems, _group, node, entries[node.device], f"{where}: node {node.name}")
        for node in tables.node
        if node.device in entries
    ]
    links = _links(tables, where, problems)
    if problems:
        raise InputError(problems)
    complete = [group for group in groups if group is not None]
    usual = _all_pairs(complete, [entries[node.device].network for node in tables.node])
    return Cluster(name=tables.name, groups=tuple(complete), links={**usual, **links})


def _collect(problems: list[Violation], make: Any, *arguments: Any) -> Any:
    """`make(*arguments)`, or None after adding what is wrong to `problems`."""
    try:
        return make(*arguments)
    except InputError as error:
        problems.extend(error.violations)
        return None


def _devices(tables: ClusterTables, where: str, problems: list[Violation]) -> dict[str, CatalogueEntry]:
    entries = {}
    for name in dict.fromkeys([*(node.device for node in tables.node), *tables.device]):
        place = f"{where}: device.{name}"
        entry = _collect(problems, _device_entry, name, tables.device.get(name), place)
        if entry is not None:
            entries[name] = entry
    return entries


def _device_entry(name: str, table: DeviceTable | None, where: str) -> CatalogueEntry:
    if name in catalogue():
        entry = catalogue()[name]
    elif table is None:
        entry = get_device(name, where)
    else:
        entry = _new_device(name, table, where)
    return entry if table is None else replace(entry, device=_overridden(entry.device, table, where))


def _new_device(name: str, table: DeviceTable, where: str) -> CatalogueEntry:
    missing = [key for key in ("memory", "memory_bandwidth", "flops") if getattr(table, key) is None]
    if missing:
        raise InputError(
            [
                Violation(where, f"not in the catalogue, so {key} must be given", nearest(name, catalogue()))
                for key in missing
            ]
        )
    # A new device says nothing about its node: the links must then be given with the nodes.
    usual = catalogue()["rtx-3090"]
    return replace(usual, device=Device(name=name, memory_bytes=1, memory_bytes_per_s=1.0), source=where)


def _overridden(device: Device, table: DeviceTable, where: str) -> Device:
    changes: dict[str, Any] = {}
    if table.memory is not None:
        changes["memory_bytes"] = parse_bytes(table.memory, f"{where}.memory")
    if table.memory_bandwidth is not None:
        changes["memory_bytes_per_s"] = parse_bytes_per_second(
            table.memory_bandwidth, f"{where}.memory_bandwidth"
        )
    if table.flops is not None:
        unknown = [key for key in table.flops if key not in PRECISION_BYTES]
        if unknown:
            allowed = ", ".join(PRECISION_BYTES)
            raise InputError(
                [
                    Violation(
                        f"{where}.flops.{key}",
                        f"precision is not one of {allowed}",
                        nearest(key, PRECISION_BYTES),
                    )
                    for key in unknown
                ]
            )
        changes["flops_per_s"] = {
            **device.flops_per_s,
            **{
                key: parse_flops_per_second(value, f"{where}.flops.{key}")
                for key, value in table.flops.items()
            },
        }
    if table.launch is not None:
        changes["launch_s"] = parse_seconds(table.launch, f"{where}.launch")
    if table.synchronous is not None:
        changes["synchronous"] = table.synchronous
    if table.price_per_hour is not None:
        changes["price_per_hour"] = table.price_per_hour
    return replace(device, **changes)


def _group(node: NodeTable, entry: CatalogueEntry, where: str) -> NodeGroup:
    bandwidth, latency = entry.link.bytes_per_s, entry.link.latency_s
    if node.bandwidth is not None:
        bandwidth = parse_bytes_per_second(node.bandwidth, f"{where}.bandwidth")
    if node.latency is not None:
        latency = parse_seconds(node.latency, f"{where}.latency")
    return NodeGroup(
        name=node.name,
        count=node.count,
        device=entry.device,
        devices=node.devices,
        link=Link(bandwidth, latency),
    )


def _links(tables: ClusterTables, where: str, problems: list[Violation]) -> dict[tuple[str, str], Link]:
    names = {node.name for node in tables.node}
    links: dict[tuple[str, str], Link] = {}
    for index, link in enumerate(tables.link):
        place = f"{where}: link.{index}"
        pair = tuple(sorted(link.between))
        problems += [
            Violation(
                f"{place}.between",
                f"{name!r} is not a node group: {', '.join(sorted(names))}",
                nearest(name, names),
            )
            for name in link.between
            if name not in names
        ]
        if pair in links:
            problems.append(Violation(place, f"the link between {pair[0]} and {pair[1]} is given twice"))
        bandwidth = _collect(problems, parse_bytes_per_second, link.bandwidth, f"{place}.bandwidth")
        latency = _collect(problems, parse_seconds, link.latency, f"{place}.latency")
        if bandwidth is not None and latency is not None:
            links[pair[0], pair[1]] = Link(bandwidth, latency)
    return links


def to_toml(cluster: Cluster) -> str:
    """The CLUSTER.toml of a cluster; reading it back gives an equal cluster."""
    lines = [f"name = {json.dumps(cluster.name)}", ""]
    for group in cluster.groups:
        lines += [
            "[[node]]",
            f"name = {json.dumps(group.name)}",
            f"count = {group.count}",
            f"device = {json.dumps(group.device.name)}",
            f"devices = {group.devices}",
            f"bandwidth = {group.link.bytes_per_s!r}",
            f"latency = {group.link.latency_s!r}",
            "",
        ]
    for (first, second), link in sorted(cluster.links.items()):
        lines += [
            "[[link]]",
            f"between = {json.dumps([first, second])}",
            f"bandwidth = {link.bytes_per_s!r}",
            f"latency = {link.latency_s!r}",
            "",
        ]
    for device in {group.device.name: group.device for group in cluster.groups}.values():
        flops = ", ".join(f"{key} = {value!r}" for key, value in device.flops_per_s.items())
        lines += [
            f"[device.{json.dumps(device.name)}]",
            f"memory = {device.memory_bytes}",
            f"memory_bandwidth = {device.memory_bytes_per_s!r}",
            f"flops = {{ {flops} }}",
            f"launch = {device.launch_s!r}",
            f"synchronous = {json.dumps(device.synchronous)}",
        ]
        if device.price_per_hour is not None:
            lines.append(f"price_per_hour = {device.price_per_hour!r}")
        lines.append("")
    return "\n".join(lines)
