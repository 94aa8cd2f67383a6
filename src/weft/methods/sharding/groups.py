"""The groups of ranks that share the states of a stage out among themselves, and those that meet across."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.program.layout import PipelineLayout
from weft.program.passes import GroupTable
from weft.program.program import NONE, Groups, Ints


def islands_of(replicas: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The replicas of each island of `size`, given the ranks of every replica.

    Neighbours in rank form an island, because the devices of a node have neighbouring ranks.
    """
    order = list(range(len(replicas)))
    if size < len(replicas):
        order.sort(key=lambda replica: min(replicas[replica]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def group_tables(layout: PipelineLayout, sharers: int) -> tuple[GroupTable, GroupTable]:
    """The groups that share out the same weights, and those with the same share in all islands.

    Where all replicas are `sharers` the first are all that hold the same weights, and the second are none.
    Stages with the same holders share groups.
    """
    islands = [islands_of(stage.replicas, sharers) for stage in layout.stages]
    # Replicas have the same share of a stage at the same place in all islands.
    across = [[list(same) for same in zip(*one, strict=True)] if len(one) > 1 else [] for one in islands]
    return (
        _table((GATHER, REDUCE), *_groups(layout, islands)),
        _table((REDUCE_ACROSS,), *_groups(layout, across)),
    )


def _table(kinds: tuple[int, ...], groups: Groups, table: Ints) -> GroupTable:
    return GroupTable(kinds=kinds, groups=groups, by=("stage", "replica"), table=table)


def _groups(layout: PipelineLayout, parts: Sequence[list[list[int]]]) -> tuple[Groups, Ints]:
    """A group for each lane of each part of a stage's replicas; that of (stage, replica, lane)."""
    numbers: dict[bytes, int] = {}
    groups: list[tuple[int, ...]] = []
    lanes = len(layout.stages[0].replicas[0])
    table = np.full((len(layout.stages), layout.replicas, lanes), NONE, dtype=np.int64)
    for index, ranks in enumerate(layout.rank_tables):
        for replicas in parts[index]:
            for lane in range(lanes):
                group = ranks[replicas, lane]
                number = numbers.setdefault(np.sort(group).tobytes(), len(groups))
                if number == len(groups):
                    groups.append(tuple(group.tolist()))
                table[index, replicas, lane] = number
    return tuple(groups), table
