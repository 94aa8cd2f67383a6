"""CLUSTER.toml and short words for clusters: how people say which devices they have.

What a file leaves out comes from the catalogue: the size of a node, the link inside it, and the network
between nodes, where two groups are joined by the slower of their networks. A device that is not in the
catalogue has no usual node, so its file must give all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from weft.describe.catalogue import canonical_name, catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_expression import (
    MOST_DEVICES,
    cluster_from_expression,
    is_expression,
    needed_links,
    slower,
)
from weft.describe.device import Device
from weft.describe.reading import read_toml, violations_of
from weft.describe.this_machine import THIS_MACHINE, this_machine
from weft.describe.toml_text import Value, key_text, table_text
from weft.describe.units import (
    BYTES,
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    SECONDS,
    exact_text,
    parse_bytes,
    parse_bytes_per_second,
    parse_flops_per_second,
    parse_seconds,
    shown,
)
from weft.errors import InputError, Violation, nearest

# Beyond them a number is a mistake, and times would leave the range of ticks.
LOWEST_SPEED, HIGHEST_SPEED = 0.001, 1000.0


def _quantity(example: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}], "examples": [example]}
    )


Bytes = Annotated[int, BeforeValidator(parse_bytes), _quantity("80 GB")]
Bandwidth = Annotated[float, BeforeValidator(parse_bytes_per_second), _quantity("25 Gbit/s")]
Seconds = Annotated[float, BeforeValidator(parse_seconds), _quantity("3 us")]
Flops = Annotated[float, BeforeValidator(parse_flops_per_second), _quantity("312 TFLOP/s")]
Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Speed = Annotated[float, Field(ge=LOWEST_SPEED, le=HIGHEST_SPEED)]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NodeTable(_Table):
    """`[[node]]`: `count` equal nodes."""

    name: Name
    count: Count = 1
    device: Name
    devices: Count | None = None
    bandwidth: Bandwidth | None = Field(default=None, description="per device and direction")
    latency: Seconds | None = None
    speeds: list[Speed] | None = Field(
        default=None, description="how fast each device of a node computes, relative to the device"
    )


class LinkTable(_Table):
    """`[[link]]`: what joins the nodes of two groups, or of one."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    bandwidth: Bandwidth = Field(description="per node and direction")
    latency: Seconds


class DeviceTable(_Table):
    """`[device.NAME]`: overrides the catalogue, or describes a device that is not in it."""

    memory: Bytes | None = None
    memory_bandwidth: Bandwidth | None = None
    flops: dict[Precision, Flops] | None = Field(default=None, description="dense peak by precision")
    launch: Seconds | None = Field(default=None, description="host time to launch one kernel")
    synchronous: bool | None = Field(default=None, description="the host computes itself, as a CPU does")
    price_per_hour: Annotated[float, Field(ge=0)] | None = None


class ClusterFile(_Table):
    """CLUSTER.toml."""

    name: Name | None = Field(default=None, description="the file's own name when absent")
    node: Annotated[list[NodeTable], Field(min_length=1)]
    link: list[LinkTable] = Field(default_factory=list)
    device: dict[str, DeviceTable] = Field(default_factory=dict)


def parse_cluster(text: str) -> Cluster:
    """A cluster from ``this-machine``, an expression such as ``64xa100-80gb``, or the path of a file.

    Raises:
        InputError: when it is none of these, or the file is broken; all violations at once.
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
    raise InputError(Violation("cluster", f"{shown(text)} is not {THIS_MACHINE}, {example}", _counted(near)))


def load_cluster(path: Path | str) -> Cluster:
    """The cluster that a CLUSTER.toml describes.

    Raises:
        InputError: listing everything that is wrong with the file.
    """
    return cluster_of(read_toml(path), str(path))


def cluster_of(record: Mapping[str, Any], where: str) -> Cluster:
    """The cluster described by the tables of a CLUSTER.toml; `where` names the file in refusals.

    Raises:
        InputError: listing everything that is wrong with them.
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
    return Cluster(name=file.name or Path(where).stem, groups=groups, links=links)


def to_toml(cluster: Cluster) -> str:
    """The CLUSTER.toml that `cluster_of` reads back to an equal cluster.

    Raises:
        InputError: when two different devices of the cluster have one name.
    """
    devices: dict[str, Device] = {}
    for group in cluster.groups:
        if devices.setdefault(group.device.name, group.device) != group.device:
            raise InputError(
                Violation(cluster.name, f"two different devices are called {group.device.name!r}")
            )
    nodes: list[dict[str, Value]] = [
        {
            "name": group.name,
            "count": group.count,
            "device": group.device.name,
            "devices": group.devices,
            **_link_values(group.link),
            **({"speeds": list(group.speeds)} if group.speeds else {}),
        }
        for group in cluster.groups
    ]
    links: list[dict[str, Value]] = [
        {"between": list(pair), **_link_values(link)} for pair, link in sorted(cluster.links.items())
    ]
    texts = [table_text("", {"name": cluster.name})]
    texts += [table_text("[[node]]", values) for values in nodes]
    texts += [table_text("[[link]]", values) for values in links]
    texts += [
        table_text(f"[device.{key_text(name)}]", _device_values(device)) for name, device in devices.items()
    ]
    return "\n".join(texts)


def _devices(file: ClusterFile, where: str, problems: list[Violation]) -> dict[str, Device]:
    """The devices that the nodes name, with the file's overrides, by the name the nodes use."""
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
        "flops_per_s": table.flops,
        "launch_s": table.launch,
        "synchronous": table.synchronous,
        "price_per_hour": table.price_per_hour,
    }
    base = known or Device(name=name, memory_bytes=1, memory_bytes_per_s=1.0)
    return replace(base, **{key: value for key, value in given.items() if value is not None})


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
            problem = f"has {len(speeds)} numbers, but a node has {size} devices; one for each is needed"
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
                )
            )
    return tuple(groups)


def _links(file: ClusterFile, where: str, problems: list[Violation]) -> dict[tuple[str, str], Link]:
    """The links of the file, completed by the catalogue's networks."""
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


def _link_values(link: Link) -> dict[str, Value]:
    return {
        "bandwidth": exact_text(link.bytes_per_s, BYTES_PER_SECOND, parse_bytes_per_second),
        "latency": exact_text(link.latency_s, SECONDS, parse_seconds),
    }


def _device_values(device: Device) -> dict[str, Value]:
    values: dict[str, Value] = {
        "memory": exact_text(device.memory_bytes, BYTES, parse_bytes),
        "memory_bandwidth": exact_text(device.memory_bytes_per_s, BYTES_PER_SECOND, parse_bytes_per_second),
        "flops": {
            precision: exact_text(speed, FLOPS_PER_SECOND, parse_flops_per_second)
            for precision, speed in sorted(device.flops_per_s.items())
        },
        "launch": exact_text(device.launch_s, SECONDS, parse_seconds),
        "synchronous": device.synchronous,
    }
    if device.price_per_hour is not None:
        values["price_per_hour"] = device.price_per_hour
    return values


def _counted(near: str) -> str:
    return f"1x{near}" if near in catalogue() else near


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False  # too long or malformed for a path
