"""Small mixed clusters."""

from __future__ import annotations

from collections.abc import Sequence

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device


def device(name: str, flops_per_s: float) -> Device:
    return Device(name=name, memory_bytes=2**30, memory_bytes_per_s=1e10, flops_per_s={"fp32": flops_per_s})


def group(
    name: str,
    kind: Device,
    *,
    nodes: int = 1,
    devices: int = 1,
    speeds: tuple[float, ...] = (),
) -> NodeGroup:
    return NodeGroup(
        name=name, count=nodes, device=kind, devices=devices, link=Link(1e9, 50e-6), speeds=speeds
    )


def mixed(speeds: Sequence[float] = (1.0, 0.5), bytes_per_s: float = 2e7, latency_s: float = 1e-4) -> Cluster:
    """A node of one device for each speed, all joined alike."""
    groups = tuple(
        group(f"g{index}", device(f"d{index}", 4e10 * speed)) for index, speed in enumerate(speeds)
    )
    names = [one.name for one in groups]
    links = {
        (one, other): Link(bytes_per_s, latency_s)
        for index, one in enumerate(names)
        for other in names[index + 1 :]
    }
    return Cluster(name="mixed", groups=groups, links=links)
