"""The tables of a CLUSTER.toml, and the text of a cluster in these tables."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_expression import MOST_DEVICES
from weft.describe.device import Device
from weft.describe.toml_table import TomlTable, Value, Word, key_text, table_text
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
)
from weft.errors import InputError, Violation

# A speed outside this range is a mistake, and its times would exceed the range of ticks.
LOWEST_SPEED, HIGHEST_SPEED = 0.001, 1000.0


def _quantity(example: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}], "examples": [example]}
    )


Bytes = Annotated[int, BeforeValidator(parse_bytes), _quantity("80 GB")]
Bandwidth = Annotated[float, BeforeValidator(parse_bytes_per_second), _quantity("25 Gbit/s")]
Seconds = Annotated[float, BeforeValidator(parse_seconds), _quantity("3 us")]
Flops = Annotated[float, BeforeValidator(parse_flops_per_second), _quantity("312 TFLOP/s")]
Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Speed = Annotated[float, Field(ge=LOWEST_SPEED, le=HIGHEST_SPEED)]
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]


class NodeTable(TomlTable):
    """`[[node]]`: `count` equal nodes."""

    name: Word
    count: Count = 1
    device: Word
    devices: Count | None = None
    bandwidth: Bandwidth | None = Field(default=None, description="per device and direction")
    latency: Seconds | None = None
    speeds: list[Speed] | None = Field(
        default=None, description="how fast each device of a node computes, relative to the device"
    )
    interface: Word | None = Field(
        default=None, description="the network interface for messages between nodes, such as eth1"
    )


class LinkTable(TomlTable):
    """`[[link]]`: the link between the nodes of two groups, or of one."""

    between: Annotated[list[Word], Field(min_length=2, max_length=2)]
    bandwidth: Bandwidth = Field(description="per node and direction")
    latency: Seconds


class DeviceTable(TomlTable):
    """`[device.NAME]`: overrides of the catalogue, or a device outside the catalogue."""

    memory: Bytes | None = None
    memory_bandwidth: Bandwidth | None = None
    reserve: Bytes | None = Field(
        default=None,
        description="memory that no plan gets: driver, libraries, communicators (if absent, 0.5 GiB beside "
        "the communicators of the plan)",
    )
    host_bandwidth: Bandwidth | None = Field(
        default=None, description="peak of the link to host memory, in one direction"
    )
    flops: dict[Precision, Flops] | None = Field(default=None, description="dense peak by precision")
    launch: Seconds | None = Field(default=None, description="host time to launch one kernel")
    synchronous: bool | None = Field(default=None, description="the host computes itself, as a CPU does")
    price_per_hour: Annotated[float, Field(ge=0)] | None = None


class ClusterFile(TomlTable):
    """CLUSTER.toml."""

    name: Word | None = Field(default=None, description="the file's own name when absent")
    node: Annotated[list[NodeTable], Field(min_length=1)]
    link: list[LinkTable] = Field(default_factory=list)
    device: dict[str, DeviceTable] = Field(default_factory=dict)


def cluster_record(cluster: Cluster) -> dict[str, Any]:
    """Return the tables that `weft.describe.cluster_file.cluster_of` reads as an equal cluster.

    Raises:
        InputError: when two different devices of the cluster have one name.
    """
    devices: dict[str, Device] = {}
    for group in cluster.groups:
        if devices.setdefault(group.device.name, group.device) != group.device:
            raise InputError(
                Violation(cluster.name, f"two different devices are called {group.device.name!r}")
            )
    nodes = [
        {
            "name": group.name,
            "count": group.count,
            "device": group.device.name,
            "devices": group.devices,
            **_link_values(group.link),
            **({"speeds": list(group.speeds)} if group.speeds else {}),
            **({"interface": group.interface} if group.interface else {}),
        }
        for group in cluster.groups
    ]
    links = [{"between": list(pair), **_link_values(link)} for pair, link in sorted(cluster.links.items())]
    described = {name: _device_values(device) for name, device in devices.items()}
    return {"name": cluster.name, "node": nodes, "link": links, "device": described}


def to_toml(cluster: Cluster) -> str:
    """Write the CLUSTER.toml of a cluster; see `cluster_record`."""
    record = cluster_record(cluster)
    texts = [table_text("", {"name": record["name"]})]
    texts += [table_text(f"[[{key}]]", values) for key in ("node", "link") for values in record[key]]
    texts += [table_text(f"[device.{key_text(name)}]", values) for name, values in record["device"].items()]
    return "\n".join(texts)


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
    if device.host_bytes_per_s is not None:
        values["host_bandwidth"] = exact_text(
            device.host_bytes_per_s, BYTES_PER_SECOND, parse_bytes_per_second
        )
    if device.reserve_bytes is not None:
        values["reserve"] = exact_text(device.reserve_bytes, BYTES, parse_bytes)
    if device.price_per_hour is not None:
        values["price_per_hour"] = device.price_per_hour
    return values
