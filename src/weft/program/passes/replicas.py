"""The groups in which replicas of a stage meet, each lane with the same lane of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.program.layout import PipelineLayout
from weft.program.passes import GroupTable
from weft.program.program import NONE


def replica_groups(
    kinds: tuple[int, ...], layout: PipelineLayout, parts: Sequence[Sequence[Sequence[int]]]
) -> GroupTable:
    """A group for each lane of each part of a stage's replicas; `parts` are by stage the replicas of each.

    Stages with the same holders share groups; a replica that is in no part meets nobody.
    """
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
    return GroupTable(kinds=kinds, groups=tuple(groups), by=("stage", "replica"), table=table)
