"""Placements of the ranks of a mesh on a cluster of unlike nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, permutations
from typing import NamedTuple

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.layout import Layout
from weft.planning.planners.metis_form import devices_in_turn
from weft.program.arrays import Ints


class GroupOrder(NamedTuple):
    """An order of the groups of nodes, and the axis that runs over neighbouring devices.

    With `stages_neighbour` a replica's whole pipeline sits on neighbouring devices, so replicas may be
    unlike. Otherwise the replicas of a stage do, so stages may be unlike.
    """

    groups: tuple[int, ...]
    stages_neighbour: bool


def placements_of(cluster: Cluster, most_orders: int) -> Iterator[GroupOrder]:
    """Yield up to `most_orders` orders of the groups, each with both axes; groups with the most memory first.

    Early stages keep the activations of most micro-batches.
    """
    rooms = [group.device.usable_bytes for group in cluster.groups]
    by_room = sorted(range(len(rooms)), key=lambda group: -rooms[group])
    for order in islice(permutations(by_room), most_orders):
        for stages_neighbour in (False, True):
            yield GroupOrder(order, stages_neighbour)


def devices_of(cluster: Cluster, layout: Layout, placement: GroupOrder) -> Ints:
    """Return the device of every rank, shape (stages, replicas, ranks of a replica of a stage)."""
    devices = devices_in_turn(cluster, placement.groups)
    if layout.ranks < cluster.ranks:
        # The ranks of a plan are those of the first devices.
        devices = np.arange(layout.ranks)
    stages, replicas = layout.pp, layout.dp
    if placement.stages_neighbour:
        return devices.reshape(replicas, stages, layout.width).transpose(1, 0, 2)
    return devices.reshape(stages, replicas, layout.width)
