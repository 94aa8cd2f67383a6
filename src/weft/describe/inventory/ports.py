"""The network ports of a node: `ibstat`, `ibstatus`, and the folders of the Linux kernel.

Sources: the manual pages of ibstat and ibstatus; the kernel's ABI documents of sysfs-class-infiniband and
sysfs-class-net.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.describe.cluster import Link
from weft.describe.one_line import one_line
from weft.errors import InputError, Violation

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
# As in the catalogue: messages between adapters, and through the kernel's TCP.
_ADAPTER_S, _TCP_S = 10e-6, 30e-6
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that is up: its adapter, its bytes/s in one direction, InfiniBand or Ethernet.

    `remote_memory` is true of adapters that read and write memory of other nodes.
    """

    name: str
    bytes_per_s: float
    layer: str
    remote_memory: bool = True

    __repr__ = one_line


def read_ports(text: str, where: str) -> tuple[Port, ...]:
    """Read the ports that are up from the text of `ibstat` or `ibstatus`.

    Raises:
        InputError: if the text describes no port at all, naming `where`.
    """
    ports: list[Port] = []
    found = False
    # Each adapter of ibstat has ports; each port of ibstatus is a record of its own.
    for record in re.split(r"(?m)^\s*(?=CA '|Infiniband device ')", text):
        name = re.match(r"(?:CA|Infiniband device) '([^']+)'", record)
        for part in re.split(r"(?m)^\s*Port \d+:\s*$", record)[1:] or [record]:
            keys = {key.strip().lower().replace("_", " "): value.strip() for key, value in _keys(part)}
            if name is None or "rate" not in keys:
                continue
            found = True
            ports += _up(name[1], keys.get("state", ""), keys["rate"], keys.get("link layer", INFINIBAND))
    if not found:
        raise InputError(Violation(where, "no ports; weft reads ibstat and ibstatus"))
    return tuple(ports)


def ports_of(system: Path = Path("/sys/class")) -> tuple[Port, ...]:
    """Return the ports of this machine that are up, as the kernel lists them."""
    ports: list[Port] = []
    for folder in sorted(system.glob("infiniband/*/ports/*")):
        values = [_value(folder / name) for name in ("state", "rate", "link_layer")]
        ports += _up(folder.parent.parent.name, values[0], values[1], values[2] or INFINIBAND)
    for folder in sorted(system.glob("net/*")):
        real = (folder / "device").exists() or (folder / "bonding").exists()
        speed = _NUMBER.match(_value(folder / "speed"))  # Mbit/s; -1 where the driver knows none
        if real and speed and _value(folder / "operstate") == "up" and not (folder / "master").exists():
            ports.append(
                Port(
                    name=folder.name,
                    bytes_per_s=float(speed[1]) * 1e6 / 8,
                    layer=ETHERNET,
                    remote_memory=False,
                )
            )
    return tuple(port for port in ports if port.bytes_per_s)


def network_of(ports: Iterable[Port]) -> tuple[Link, str] | None:
    """Return the link between two nodes with such ports, and its source in words; None without ports.

    Adapters of InfiniBand come before those of Ethernet, and these before plain interfaces. Of one kind, the
    fastest count: slower ones are of storage and management. Adapters are used together, interfaces are not.
    """
    kinds: dict[tuple[bool, bool], list[Port]] = {}
    for port in ports:
        kinds.setdefault((port.remote_memory, port.layer == INFINIBAND), []).append(port)
    if not kinds:
        return None
    alike = kinds[max(kinds)]
    fastest = [port for port in alike if port.bytes_per_s == max(one.bytes_per_s for one in alike)]
    used = fastest if fastest[0].remote_memory else fastest[:1]
    names = ", ".join(port.name for port in used)
    words = f"{len(used)} x {used[0].bytes_per_s * 8 / 1e9:g} Gbit/s {used[0].layer}: {names}"
    latency_s = _ADAPTER_S if used[0].remote_memory else _TCP_S
    return Link(sum(port.bytes_per_s for port in used), latency_s), words


def _up(name: str, state: str, rate: str, layer: str) -> Iterator[Port]:
    """Yield the port if it is up; its rate is in Gbit/s, ``200`` or ``200 Gb/sec (4X HDR)``."""
    number = _NUMBER.match(rate)
    if number and "active" in state.lower() and float(number[1]):
        yield Port(name=name, bytes_per_s=float(number[1]) * 1e9 / 8, layer=layer)


def _keys(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(?m)^\s*([A-Za-z_ ]+):[ \t]*(.*)$", text)


def _value(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # the kernel refuses to say it, such as the speed of a port without a cable
