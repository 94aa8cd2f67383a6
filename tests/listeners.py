"""Who listens on the network: read from the kernel's tables, for tests of what a stranger can reach."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_LISTENING = "0A"


def listeners(root: psutil.Process) -> list[tuple[int, str]]:
    """(process, address) of every TCP listener of a process and of all below it.

    Each is looked up in the tables of its own namespace, which psutil does not do.
    """
    return [
        (process.pid, str(address))
        for process in (root, *root.children(recursive=True))
        for address in _addresses(process.pid)
    ]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _addresses(process: int) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in sockets:
                yield _address(local.partition(":")[0])


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """From words of 32 bits in hexadecimal, each in the byte order of this machine."""
    words = [int(text[first : first + 8], 16) for first in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return ipaddress.ip_address(
        socket.inet_ntop(socket.AF_INET6 if len(words) > 1 else socket.AF_INET, packed)
    )
