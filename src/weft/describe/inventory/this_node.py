"""This machine as a listed node, with its links."""

from __future__ import annotations

import socket
from collections import Counter

from weft.describe.inventory.device_names import devices_named
from weft.describe.inventory.draft import NodeLinks
from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.ports import ports_of
from weft.describe.inventory.topology import read_topology
from weft.describe.this_machine import nvidia_devices, nvidia_smi


def this_node() -> tuple[ListedNode, ...]:
    """Return this machine, once for each kind of its NVIDIA devices; empty without any."""
    devices = nvidia_devices()
    memories: dict[str, int] = {}
    for name, memory_bytes in devices:
        memories[name] = min(memories.get(name, memory_bytes), memory_bytes)
    return tuple(
        ListedNode(name=socket.gethostname(), device=name, devices=count, memory_bytes=memories[name])
        for name, count in Counter(name for name, _ in devices).items()
    )


def links_here(nodes: tuple[ListedNode, ...]) -> NodeLinks:
    """Return the links of this machine, for nodes with its devices; none if it has several kinds or none.

    Raises:
        InputError: if the driver prints a matrix that cannot be read.
    """
    if len(nodes) != 1:
        return NodeLinks()
    node = nodes[0]
    text = nvidia_smi("topo", "-m")
    topology = read_topology(text, "nvidia-smi topo -m") if text else None
    kind = next(iter(devices_named(node.device, node.memory_bytes)), node.device)
    return NodeLinks(topology=topology, ports=ports_of(), of=(kind, node.devices))
