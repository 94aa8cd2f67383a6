"""The groups of ranks that shard the states of a stage, and the groups across islands."""

from __future__ import annotations

from collections.abc import Sequence

from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.program.layout import PipelineLayout
from weft.program.passes import GroupTable, replica_groups


def islands_of(replicas: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the replicas of each island of `size`; `replicas` has the ranks of every replica.

    Neighbours in rank form an island, because the devices of a node have neighbouring ranks.
    """
    order = list(range(len(replicas)))
    if size < len(replicas):
        order.sort(key=lambda replica: min(replicas[replica]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def group_tables(layout: PipelineLayout, sharers: int) -> tuple[GroupTable, GroupTable]:
    """Return the groups that shard the same weights, and the groups with the same shard in all islands.

    If `sharers` is the number of replicas, there are no groups of the second kind. Stages with the same
    holders share groups.
    """
    holders = [stage.replicas for stage in layout.stages]
    islands = {held: islands_of(held, sharers) for held in set(holders)}
    # Replicas at the same place in their islands have the same shard of a stage.
    across = {
        held: [list(same) for same in zip(*one, strict=True)] if len(one) > 1 else []
        for held, one in islands.items()
    }
    return (
        replica_groups((GATHER, REDUCE), layout, [islands[held] for held in holders]),
        replica_groups((REDUCE_ACROSS,), layout, [across[held] for held in holders]),
    )
