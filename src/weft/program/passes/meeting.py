"""A meeting: one row per step on every device that trains, before the device's first step."""

from __future__ import annotations

from itertools import chain

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import MAKES_GRADIENTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges


def add_meeting(
    pipeline: LoweredPipeline,
    kind: int,
    size_bytes: int,
    *,
    awaits: Ints | tuple[()] = (),
    steps_wait: bool,
) -> LoweredPipeline:
    """Return the pipeline with a meeting after the last backward pass of each device.

    The row has the coordinates of the device's first stage to step, because ids are made of coordinates.

    Args:
        kind: the code of the meeting's kind.
        size_bytes: the bytes that a rank exchanges.
        awaits: rows that the meeting waits for, beside the backward passes.
        steps_wait: True: every step of a device waits for its meeting.
    """
    columns = pipeline.columns
    steps = np.flatnonzero(columns.kind == STEP)
    devices, first = np.unique(columns.rank[steps], return_index=True)
    anchors = steps[first]
    meeting_of = np.full(int(columns.rank.max(initial=0)) + 1, -1, dtype=np.int64)
    meeting_of[devices] = len(columns) + np.arange(len(devices), dtype=np.int64)
    makers = np.flatnonzero(is_any_of(columns.kind, MAKES_GRADIENTS))
    # A device's computations run one after the other, so its last computation stands for all.
    last = makers[np.searchsorted(columns.rank[makers], devices, side="right") - 1]
    awaited = np.concatenate([np.asarray(awaits, dtype=np.int64), last])
    edges = [Edges.of(awaited, meeting_of[columns.rank[awaited]])]
    if steps_wait:
        edges.append(Edges.of(meeting_of[columns.rank[steps]], steps))
    added = Columns.of(
        len(devices),
        kind=kind,
        stage=columns.stage[anchors],
        replica=columns.replica[anchors],
        rank=devices,
        bytes=size_bytes,
    )
    return insert(pipeline, added, anchors, np.full(len(anchors), -1, dtype=np.int64), Edges.join(edges))


def meeting_groups(layout: PipelineLayout, kind: int, *, by_replica: bool = False) -> tuple[GroupTable, ...]:
    """Return the groups of a meeting: all ranks that hold a trained stage, rising, or those of each replica.

    `by_replica` needs ranks that hold stages of one replica only.
    """
    trained = layout.stages[layout.frozen_stages :]
    held = [stage.replicas for stage in trained]
    together = zip(*held, strict=True) if by_replica else [chain.from_iterable(held)]
    groups = tuple(tuple(sorted({rank for ranks in some for rank in ranks})) for some in together)
    table = np.repeat(np.arange(len(groups), dtype=np.int64)[:, None], layout.most_lanes, axis=1)
    by, table = (("replica",), table) if by_replica else ((), table[0])
    return (GroupTable(kinds=(kind,), groups=groups, by=by, table=table),)
