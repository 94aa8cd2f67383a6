"""The groups of ranks of a `PipelineLayout` that share weights out among themselves, or add gradients up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from weft.describe.plan import context_groups_of
from weft.program.layout import PipelineLayout
from weft.program.program import NONE, Ints

# The ranks of each group.
Groups = tuple[tuple[int, ...], ...]


def islands_of(replicas: Sequence[Sequence[int]], size: int | None) -> list[list[int]]:
    """The replicas of each island of `size`, given the ranks of every replica; None: one island of all.

    Neighbours in rank form an island, because the devices of a node have neighbouring ranks.
    """
    order = list(range(len(replicas)))
    if size is None or size == len(replicas):
        return [order]
    order.sort(key=lambda replica: min(replicas[replica]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def counterparts_of(islands: Sequence[Sequence[int]]) -> list[list[int]]:
    """The replicas with the same place, and so the same share of a stage, in all islands."""
    return [list(replicas) for replicas in zip(*islands, strict=True)]


def group_table(layout: PipelineLayout) -> tuple[Groups, Ints]:
    """The groups of ranks that share out the same weights, and that of (stage, replica, lane).

    Without islands they are all that hold the same weights. Stages with the same holders share groups.
    """
    return _groups(layout, [islands_of(stage.replicas, layout.island) for stage in layout.stages])


def across_group_table(layout: PipelineLayout) -> tuple[Groups, Ints]:
    """The groups of ranks with the same share in all islands, and that of (stage, replica, lane).

    Without islands there are none.
    """
    if layout.islands == 1:
        return _groups(layout, [[] for _ in layout.stages])
    islands = (islands_of(stage.replicas, layout.island) for stage in layout.stages)
    return _groups(layout, [counterparts_of(one) for one in islands])


def tied_group_table(layout: PipelineLayout) -> tuple[Groups, Ints]:
    """The groups of ranks with a copy of each tied weight, and that of (tied weight, lane).

    Lanes that divide the tokens hold the same copies and are in one group.
    """
    shares = len(layout.stages[0].replicas[0]) // layout.context_parallel
    groups = []
    for one in layout.tied:
        replicas = (ranks for stage in one.stages for ranks in layout.stages[stage].replicas)
        alike = zip(*(context_groups_of(ranks, layout.context_parallel) for ranks in replicas), strict=True)
        groups += [tuple(dict.fromkeys(chain.from_iterable(copies))) for copies in alike]
    table = np.arange(len(groups), dtype=np.int64).reshape(len(layout.tied), shares)
    return tuple(groups), np.tile(table, (1, layout.context_parallel))


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
