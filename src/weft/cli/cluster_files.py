"""The CLUSTER.toml that `weft init --cluster` writes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from weft.describe.catalogue import find_device
from weft.describe.cluster_tables import to_toml
from weft.describe.inventory.draft import NodeLinks, draft_cluster
from weft.describe.inventory.nodes import read_nodes
from weft.describe.inventory.ports import read_ports
from weft.describe.inventory.this_node import links_here, this_node
from weft.describe.inventory.topology import read_topology
from weft.describe.reading import read_text
from weft.describe.this_machine import this_machine
from weft.describe.units import counted
from weft.errors import InputError, Violation

STANDARD_INPUT = Path("-")


def write_cluster(
    path: Path, *, nodes: Path | None, topology: Path | None, ports: Path | None, device: str | None
) -> None:
    """Write the cluster of a list of nodes, or of this machine, and print what the file assumes.

    Raises:
        InputError: if a list cannot be read, or no node has a device.
    """
    name = None if device is None else find_device(device, "--device").device.name
    here = this_node()
    if nodes is None and not here:
        described = {"--topology": topology, "--ports": ports, "--device": device}
        problem = "this machine has no NVIDIA device that it could describe"
        for option, given in described.items():
            if given is not None:
                raise InputError(Violation(option, problem, "--nodes, a list of the nodes that have some"))
        # Without accelerators the processor's cores are the devices, all of them described.
        path.write_text(to_toml(replace(this_machine(), name=path.stem)))
        print(f"wrote {path}: this machine has no NVIDIA device; its cores are the devices")
        return
    listed = here if nodes is None else read_nodes(_text(nodes), str(nodes))
    links = _given_links(topology, ports) or links_here(here)
    sources = [str(one) for one in (nodes, topology, ports) if one is not None]
    draft = draft_cluster(
        listed, name=path.stem, sources=sources or ["the driver and the kernel"], links=links, device=name
    )
    if not draft.groups:
        raise InputError(Violation(str(nodes), f"no node has devices for jobs: {'; '.join(draft.left_out)}"))
    path.write_text(draft.to_toml())
    for line in draft.left_out:
        print(f"left out: {line}")
    for line in draft.assumed:
        print(f"assumed: {line}")
    for line in draft.missing:
        print(f"fill in: {line}")
    follow = "fill in the empty keys" if draft.missing else f"weft plan gpt2 --on {path}"
    print(f"wrote {path}: {counted(draft.nodes, 'node')}, {counted(draft.devices, 'device')}; next: {follow}")


def _given_links(topology: Path | None, ports: Path | None) -> NodeLinks | None:
    if topology is None and ports is None:
        return None
    return NodeLinks(
        topology=None if topology is None else read_topology(read_text(topology), str(topology)),
        ports=() if ports is None else read_ports(read_text(ports), str(ports)),
    )


def _text(path: Path) -> str:
    return sys.stdin.read() if path == STANDARD_INPUT else read_text(path)
