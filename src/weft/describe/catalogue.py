"""Real devices and their usual nodes, from data sheets (`catalogue.toml` names each source)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.describe.cluster import Link
from weft.describe.device import Device
from weft.describe.units import (
    parse_bytes,
    parse_bytes_per_second,
    parse_flops_per_second,
    parse_seconds,
)
from weft.errors import InputError, Violation, nearest


class Reached(NamedTuple):
    """The highest published model flops utilisation of a whole training, in [0, 1], and its source."""

    utilisation: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A device and its usual node.

    Attributes:
        devices: devices per node.
        link: the link between devices of one node, per device and direction.
        network: the network between nodes, per node and direction.
        host_bytes_per_s: peak of a device's link to host memory, in one direction.
        matmul_shares: shares of the peak that the best matrix products reach, by precision.
        flash_share: speed of FlashAttention-2 relative to products, over that on an A100.
        adds_in_switch: True if the switches of its usual node add up all-reduces (NVIDIA's NVLS).
        nvlinks, nvlink_bytes_per_s: most NVLinks of a device, and the peak of one in one direction.
        aliases: other names that expressions and files may use.
        driver_names: the device's names in the vendor's driver.
        source: the documents with the numbers.
        reached: of trainings in half precision; None where it is not known.
    """

    device: Device
    devices: int
    link: Link
    network: Link
    host_bytes_per_s: float
    nvlinks: int
    nvlink_bytes_per_s: float
    matmul_shares: Mapping[str, float]
    flash_share: float
    adds_in_switch: bool
    aliases: tuple[str, ...]
    driver_names: tuple[str, ...]
    source: str
    reached: Reached | None


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all known devices by name."""
    records = tomllib.loads(files("weft.describe").joinpath("catalogue.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _entry(name, record) for name, record in records.items()})


def canonical_name(name: str) -> str:
    """Return the catalogue's own name for a name or an alias; an unknown name is returned unchanged."""
    word = name.lower()
    for known, entry in catalogue().items():
        if word == known or word in entry.aliases:
            return known
    return name


def find_device(name: str, where: str) -> CatalogueEntry:
    """Return the entry of a name or an alias, in upper or lower case.

    Raises:
        InputError: when there is none, with the nearest name.
    """
    known = catalogue()
    entry = known.get(canonical_name(name))
    if entry is None:
        problem = f"{name!r} is not in the catalogue: {', '.join(known)}"
        # A name without its memory, such as a100, matches the devices that begin with it.
        begun = [other for other in known if other.startswith(f"{name.lower()}-")]
        near = " or ".join(begun) or nearest(name.lower(), known)
        raise InputError(Violation(where, problem, near))
    return entry


def _entry(name: str, record: Mapping[str, Any]) -> CatalogueEntry:
    return CatalogueEntry(
        device=Device(
            name=name,
            memory_bytes=parse_bytes(record["memory"]),
            memory_bytes_per_s=parse_bytes_per_second(record["memory_bandwidth"]),
            flops_per_s={key: parse_flops_per_second(value) for key, value in record["flops"].items()},
        ),
        devices=record["devices"],
        link=Link(parse_bytes_per_second(record["bandwidth"]), parse_seconds(record["latency"])),
        network=Link(parse_bytes_per_second(record["network"]), parse_seconds(record["network_latency"])),
        host_bytes_per_s=parse_bytes_per_second(record["host_bandwidth"]),
        nvlinks=record.get("nvlinks", 0),
        nvlink_bytes_per_s=parse_bytes_per_second(record["nvlink"]) if "nvlink" in record else 0.0,
        matmul_shares=record.get("matmul_shares", {}),
        flash_share=record.get("flash_share", 1.0),
        adds_in_switch=record.get("adds_in_switch", False),
        aliases=tuple(record.get("aliases", ())),
        driver_names=tuple(record["driver_names"]),
        source=record["source"],
        reached=Reached(**record["reached"]) if "reached" in record else None,
    )
