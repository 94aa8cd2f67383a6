"""The catalogue of devices: data-sheet figures, and the node each device usually comes in."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from weft.describe.cluster import Link
from weft.describe.device import Device
from weft.describe.units import (
    parse_bytes,
    parse_bytes_per_second,
    parse_flops_per_second,
    parse_seconds,
)
from weft.errors import InputError, Violation, nearest

# Latency of a message between two nodes over a data-centre fabric; a user's file gives the real one.
NETWORK_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A device and its usual node: `network` is the link between two nodes, its bandwidth a whole node's."""

    device: Device
    devices_per_node: int
    link: Link
    network: Link
    source: str


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """All devices by name, in the order of the package's `catalogue.toml`."""
    tables = tomllib.loads(files("weft.describe").joinpath("catalogue.toml").read_text())
    return {name: _entry(name, table) for name, table in tables.items()}


def get_device(name: str, where: str = "device") -> CatalogueEntry:
    """The catalogue's entry of that name.

    Raises:
        InputError: when there is none, with the nearest name.
    """
    if name not in catalogue():
        known = ", ".join(catalogue())
        raise InputError(
            Violation(where, f"{name!r} is not in the catalogue: {known}", nearest(name, catalogue()))
        )
    return catalogue()[name]


def _entry(name: str, table: Mapping[str, Any]) -> CatalogueEntry:
    node = table["node"]
    return CatalogueEntry(
        device=Device(
            name=name,
            memory_bytes=parse_bytes(table["memory"]),
            memory_bytes_per_s=parse_bytes_per_second(table["memory_bandwidth"]),
            flops_per_s={key: parse_flops_per_second(value) for key, value in table["flops"].items()},
        ),
        devices_per_node=node["devices"],
        link=Link(parse_bytes_per_second(node["bandwidth"]), parse_seconds(node["latency"])),
        network=Link(parse_bytes_per_second(node["network"]), NETWORK_LATENCY_S),
        source=table["source"],
    )
