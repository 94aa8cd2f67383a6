"""Servers: ranks behind those of the stages that hold no stage and add up gradients on hosts without GPUs.

They take the devices behind those of the stages, in the order of the cluster's file. So a plan with their
number alone places them, on any cluster.
"""

from __future__ import annotations

from weft.describe.cluster import Cluster


def refuse_servers(held: int, servers: int, cluster: Cluster) -> str | None:
    """Return the reason why `servers` ranks cannot follow `held` ranks of stages in a cluster, or None."""
    if servers and held + servers > cluster.ranks:
        left = max(cluster.ranks - servers, 0)
        return (
            f"{servers} servers of {cluster.ranks} devices leave {left} for stages, and these use {held}; "
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


def server_words(held: int, servers: int, cluster: Cluster) -> list[str]:
    """Return the place of each server in words, such as "server 0 on host, rank 4"."""
    ranks = range(held, held + servers)
    return [
        f"server {number} on {_node_name(rank, cluster)}, rank {rank}" for number, rank in enumerate(ranks)
    ]


def _node_name(rank: int, cluster: Cluster) -> str:
    """Return the name of a rank's node, with its number among equal ones where there are several."""
    group, node = cluster.node_of(rank)
    one = cluster.groups[group]
    return one.name if one.count == 1 else f"{one.name} {node}"
