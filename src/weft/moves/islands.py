"""How replicas that share states out form islands."""

from __future__ import annotations

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
