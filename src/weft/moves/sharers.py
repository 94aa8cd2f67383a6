"""Which replicas of a stage share its states out among themselves, and what there is to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from weft.describe.cluster import Cluster
from weft.describe.layout import Layout, PartialLayout
from weft.predict.cost.memory import SHARDINGS
from weft.program.schedules import get_schedule
from weft.program.schedules.base import paths_of


def replicas_of(layout: Layout) -> int:
    """Copies of every stage: one for each path of each pipeline."""
    return layout.dp * paths_of(get_schedule(layout.schedule))


def sharers_of(layout: Layout) -> int:
    """Replicas that share the states of a stage out among themselves."""
    return layout.island or replicas_of(layout)


def island_on_nodes(cluster: Cluster, layout: Layout) -> int | None:
    """Return the most replicas to an island that lies on one node, where nodes hold several and not all."""
    width = layout.width
    devices = [group.devices for group in cluster.groups]
    # Paths run a stage on several devices of a pipeline.
    one_path = replicas_of(layout) == layout.dp
    spread = layout.dp * width if one_path else layout.ranks
    if any(count % width for count in devices) or all(count % spread == 0 for count in devices):
        return None
    island = gcd(layout.dp, *(count // width for count in devices))
    return island if 1 < island < replicas_of(layout) else None


def sharings(
    cluster: Cluster, layout: Layout, pins: PartialLayout, *, opened: bool, lightest: bool
) -> Iterator[Layout]:
    """Yield the layout with everything that its replicas may share out, and among how many of them.

    What is pinned is as pinned. Else nothing is shared out unless `opened`, nor by one replica alone. Those
    of a node that share among themselves hold more than all replicas together, and never less: they are left
    out where the `lightest` are asked for. Only gathers that come again and again, those of zero-3, are worth
    an all-reduce across nodes.
    """
    levels = SHARDINGS
    if pins.sharding is not None:
        levels = (pins.sharding,)
    elif pins.island is not None:
        levels = SHARDINGS[1:]
    elif replicas_of(layout) == 1 or not opened:
        levels = SHARDINGS[:1]
    for sharding in levels:
        islands = [pins.island]
        if pins.island is None and sharding == "zero-3" and opened and not lightest:
            islands.append(island_on_nodes(cluster, layout))
        for island in dict.fromkeys(islands):
            yield replace(layout, sharding=sharding, island=island)


def unshared(layout: Layout) -> Layout:
    """Return the layout whose replicas share nothing out."""
    return replace(layout, sharding="zero-0", island=None)


def among_replicas(layout: Layout) -> Layout:
    """Return the layout with islands smaller than all its replicas, and nothing shared out by one alone."""
    if layout.sharding == "zero-0" or replicas_of(layout) == 1:
        return unshared(layout)
    if layout.island is not None and not 1 < layout.island < replicas_of(layout):
        return replace(layout, island=None)
    return layout
