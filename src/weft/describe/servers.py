"""Servers: ranks behind those of the stages that hold no stage and add up gradients on hosts without GPUs.

They take the devices behind those of the stages, in the order of the cluster's file. So a plan with their
number alone places them, on any cluster.
"""

from __future__ import annotations

from dataclasses import replace

from weft.describe.cluster import Cluster
from weft.describe.units import counted


def refuse_servers(held: int, servers: int, cluster: Cluster) -> str | None:
    """Return the reason why `servers` ranks cannot follow `held` ranks of stages in a cluster, or None."""
    if servers and held + servers > cluster.ranks:
        left = max(cluster.ranks - servers, 0)
        of_all = f"{counted(servers, 'server')} of {counted(cluster.ranks, 'device')}"
        return (
            f"{of_all} {'leaves' if servers == 1 else 'leave'} {left} for stages, and these use {held}; "
            "a server holds no stage"
        )
    for number, rank in enumerate(range(held, held + servers)):
        if not cluster.device_of(rank).synchronous:
            name = cluster.device_of(rank).name
            return (
                f"server {number} would be rank {rank}, a {name}; servers are the devices behind those of "
                "the stages, on hosts without accelerators"
            )
    return None


def without_servers(cluster: Cluster, servers: int) -> Cluster:
    """Return the cluster without the groups of nodes in which all devices are among the last `servers`."""
    left, first = [], 0
    for group in cluster.groups:
        if first < max(cluster.ranks - servers, 1):
            left.append(group)
        first += group.count * group.devices
    return cluster if len(left) == len(cluster.groups) else replace(cluster, groups=tuple(left))


def hosts_behind(cluster: Cluster) -> int:
    """Return the number of last devices that are hosts without accelerators, behind accelerators; else 0."""
    hosts = 0
    for group in reversed(cluster.groups):
        if not group.device.synchronous:
            return hosts
        hosts += group.count * group.devices
    return 0


def server_words(servers: range, cluster: Cluster) -> str:
    """Return the places of servers, given by their ranks, such as "server 0 on host (rank 4)"."""
    each = (
        f"server {number} on {_node_name(rank, cluster)} (rank {rank})" for number, rank in enumerate(servers)
    )
    return ", ".join(each)


def _node_name(rank: int, cluster: Cluster) -> str:
    """Return the name of a rank's node, with its number among equal ones where there are several."""
    group, node = cluster.node_of(rank)
    one = cluster.groups[group]
    return one.name if one.count == 1 else f"{one.name} {node}"
