"""Sharding groups: the replicas of a stage that shard its states, and the possible choices."""

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
    """Return the number of copies of every stage: one for each path of each pipeline."""
    return layout.dp * paths_of(get_schedule(layout.schedule))


def sharers_of(layout: Layout) -> int:
    """Return the number of replicas that shard the states of a stage among themselves."""
    return layout.island or replicas_of(layout)


def island_on_nodes(cluster: Cluster, layout: Layout) -> int | None:
    """Return the most replicas of an island inside one node; None unless nodes hold several but not all."""
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
    """Yield the layout with each choice of sharding and island.

    Pins are kept. Otherwise nothing is sharded unless `opened`, nor for a single replica. Islands inside
    nodes need at least the memory of sharding over all replicas, so `lightest` leaves them out. Only for the
    repeated gathers of zero-3 are islands worth their all-reduce across nodes.
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
    """Return the layout without sharding."""
    return replace(layout, sharding="zero-0", island=None)


def among_replicas(layout: Layout) -> Layout:
    """Return the layout without islands of one or of all replicas, and without sharding for one replica."""
    if layout.sharding == "zero-0" or replicas_of(layout) == 1:
        return unshared(layout)
    if layout.island is not None and not 1 < layout.island < replicas_of(layout):
        return replace(layout, island=None)
    return layout
