"""The connections of a node's devices: `nvidia-smi topo -m`.

Source: the legend that the tool prints, and the manual page of nvidia-smi.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.describe.catalogue import CatalogueEntry
from weft.describe.one_line import one_line
from weft.errors import InputError, Violation

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+")
_NVLINKS = re.compile(r"NV(\d+)")
# Ways over PCI Express, near to far.
_WAYS = {
    "PIX": "one PCI Express bridge",
    "PXB": "several PCI Express bridges",
    "PHB": "a PCI Express host bridge",
    "NODE": "the host bridges of one NUMA node",
    "SYS": "the connection of the NUMA nodes",
    "SOC": "the connection of the sockets",  # of drivers before 2018
}


@dataclass(frozen=True, slots=True)
class Topology:
    """`ways[i][j]` is the connection of devices i and j, in the tool's words: ``NV12``, ``PIX``, ``SYS``."""

    ways: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return one_line(self, f"{self.devices} devices: {', '.join(sorted(self.kinds))}")

    @property
    def devices(self) -> int:
        return len(self.ways)

    @property
    def kinds(self) -> frozenset[str]:
        """The connections of two different devices."""
        return frozenset(way for i, row in enumerate(self.ways) for j, way in enumerate(row) if i != j)


def read_topology(text: str, where: str) -> Topology:
    """Read the matrix of `nvidia-smi topo -m`, the first of the text.

    Raises:
        InputError: if the text has none, or one that is not square, naming `where`.
    """
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if len(line) > 1 and all(map(_DEVICE.fullmatch, line[:2]))), None)
    rows = [line[1:] for line in lines if line and line is not header and _DEVICE.fullmatch(line[0])]
    if header is None:
        header = next((line for line in lines if line and _DEVICE.fullmatch(line[0])), [])
        rows = rows[1:]  # one device: its header and its row begin alike
    devices = sum(_DEVICE.fullmatch(word) is not None for word in header)
    ways = tuple(tuple(row[:devices]) for row in rows[:devices])
    if not ways or any(len(row) != devices for row in ways) or len(ways) != devices:
        raise InputError(Violation(where, "no matrix of connections; weft reads nvidia-smi topo -m"))
    return Topology(ways)


def bandwidth_inside(topology: Topology, entry: CatalogueEntry) -> tuple[float, str]:
    """Return a device's bytes/s to the others of its node, in one direction, and the source in words.

    NVLinks count where they join all devices, by the device with the fewest. A switch gives every pair all
    links of a device, so no more than these count. Otherwise a ring passes PCI Express, and its peak counts.
    """
    counts = [[_nvlinks(way) for way in row] for row in topology.ways]
    if topology.devices > 1 and entry.nvlinks and _joined(counts):
        fewest = min(min(sum(row), entry.nvlinks) for row in counts)
        links = "NVLink" if fewest == 1 else "NVLinks"
        return fewest * entry.nvlink_bytes_per_s, f"{fewest} {links} of a device, {_kinds(topology)}"
    return entry.host_bytes_per_s, f"PCI Express; {_kinds(topology)}"


def _nvlinks(way: str) -> int:
    found = _NVLINKS.fullmatch(way)
    return int(found[1]) if found else 0


def _joined(counts: list[list[int]]) -> bool:
    """Return True if every device reaches every other one over NVLinks alone."""
    reached, fresh = {0}, [0]
    while fresh:
        row = counts[fresh.pop()]
        new = {other for other, count in enumerate(row) if count} - reached
        reached |= new
        fresh += new
    return len(reached) == len(counts)


def _kinds(topology: Topology) -> str:
    kinds = sorted(topology.kinds)
    far = [f"{kind} crosses {_WAYS[kind]}" for kind in _WAYS if kind in kinds][-1:]
    return ", ".join(["between devices: " + " ".join(kinds) if kinds else "one device", *far])
