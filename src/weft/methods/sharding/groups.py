"""The groups of ranks that share the states of a stage out among themselves, and those that meet across."""

from __future__ import annotations

from collections.abc import Sequence

from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.program.layout import PipelineLayout
from weft.program.passes import GroupTable, replica_groups


def islands_of(replicas: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the replicas of each island of `size`, given the ranks of every replica.

    Neighbours in rank form an island, because the devices of a node have neighbouring ranks.
    """
    order = list(range(len(replicas)))
    if size < len(replicas):
        order.sort(key=lambda replica: min(replicas[replica]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def group_tables(layout: PipelineLayout, sharers: int) -> tuple[GroupTable, GroupTable]:
    """Return the groups that share out the same weights, and those with the same share in all islands.

    Where all replicas are `sharers` the first are all that hold the same weights, and the second are none.
    Stages with the same holders share groups.
    """
    islands = [islands_of(stage.replicas, sharers) for stage in layout.stages]
    # Replicas have the same share of a stage at the same place in all islands.
    across = [[list(same) for same in zip(*one, strict=True)] if len(one) > 1 else [] for one in islands]
    return (
        replica_groups((GATHER, REDUCE), layout, islands),
        replica_groups((REDUCE_ACROSS,), layout, across),
    )
