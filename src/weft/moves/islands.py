"""How replicas that share states out form islands."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from weft.describe.cluster import Cluster
from weft.describe.layout import Layout
from weft.moves.layout import replicas_of


def island_on_nodes(cluster: Cluster, layout: Layout) -> int | None:
    """The most replicas to an island that lies on one node, where nodes hold several and not all."""
    width = layout.width
    devices = [group.devices for group in cluster.groups]
    # Paths run a stage on several devices of a pipeline.
    one_path = replicas_of(layout) == layout.dp
    spread = layout.dp * width if one_path else layout.ranks
    if any(count % width for count in devices) or all(count % spread == 0 for count in devices):
        return None
    island = gcd(layout.dp, *(count // width for count in devices))
    return island if 1 < island < replicas_of(layout) else None


def unshared(layout: Layout) -> Layout:
    """The layout whose replicas share nothing out."""
    return replace(layout, sharding="zero-0", island=None)


def among_replicas(layout: Layout) -> Layout:
    """The layout with islands smaller than all its replicas, and nothing shared out by one alone."""
    if layout.sharding == "zero-0" or replicas_of(layout) == 1:
        return unshared(layout)
    if layout.island is not None and not 1 < layout.island < replicas_of(layout):
        return replace(layout, island=None)
    return layout
