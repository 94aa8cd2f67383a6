"""Lanes: the ranks of a replica, each with its own copy of the replica's instructions.

Mostly all stages have equally many lanes, and lane j of one stage exchanges messages with lane j of others.
Then a lane is a copy of the lowered pipeline. Stages with unlike numbers of lanes have unlike tensor degrees.
A message has the tokens that its receiver holds. Each lane receives a value from one lane of its neighbour:
lane j of b from lane `j * a // b` of a. Where a < b, a lane sends parts of its tokens to several lanes. Where
a > b, the lanes of a gather the tokens at the end of their pass. Then not all of them send. Context ranks
divide tokens first, and tensor ranks are neighbours. So this holds for each part of the tokens by itself.

Replicas of one stage may have unlike numbers of lanes, too. Each lane of the widest one holds a shard of the
stage's weights. A lane of a narrower one holds several shards, neighbours again. It meets the other replicas
in a collective for each of them, numbered by `part`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.codes import numbered
from weft.program.kinds import is_send, joins_replicas
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, renumber
from weft.program.program import NONE, Columns, Edges


class LanePlaces(NamedTuple):
    """The places of a lowered pipeline's rows, and their ranks in every copy of it.

    Mostly a place is a device, and every lane is a copy. If stages have unlike numbers of lanes, every lane
    of a device is a place, and there is one copy.

    Attributes:
        ranks: the rank of each place, shape (pipelines, places, copies).
        lane: the lane of each place, shape (places, copies).
        device: the device of each place, as in `PipelineLayout.placement`, shape (places,).
    """

    ranks: Ints
    lane: Ints
    device: Ints

    @classmethod
    def of(cls, layout: PipelineLayout, pipelines: Sequence[int]) -> LanePlaces:
        """Return the places of these lowered pipelines, whose stages have equally many lanes."""
        table = layout.rank_table[list(pipelines)]
        _, devices, copies = table.shape
        if not layout.mixes_lanes:
            lane = np.broadcast_to(np.arange(copies, dtype=np.int64), (devices, copies))
            return cls(table, lane, np.arange(devices, dtype=np.int64))
        device, lane = np.nonzero(table[0] != NONE)
        return cls(table[:, device, lane][..., None], lane[:, None], device)

    def lane_of(self, layout: PipelineLayout, columns: Columns, copy: int) -> Ints:
        """Return the lane of each row in a copy; of a shard among unlike replicas, that in the widest."""
        lane: Ints = self.lane[columns.rank, copy]
        if not layout.mixes_replicas:
            return lane
        return np.where(_meets_by_shard(layout, columns), columns.part, lane)


def _meets_by_shard(layout: PipelineLayout, columns: Columns) -> Mask:
    """Return True for each collective that joins the shards of unlike replicas."""
    if not layout.mixes_replicas:
        return np.zeros(len(columns), dtype=np.bool_)
    unlike = np.array([len(set(stage.widths.tolist())) > 1 for stage in layout.stages])
    found: Mask = joins_replicas(columns.kind) & unlike[columns.stage]
    return found


def over_lanes(pipeline: LoweredPipeline, layout: PipelineLayout, own: tuple[int, ...]) -> LoweredPipeline:
    """Return the rows of all lanes of a lowered pipeline, sorted by the places of `LanePlaces`.

    `own` has the lanes of each stage's replica in the pipeline. Of `most_lanes` copies of the pipeline, a
    stage of n lanes keeps n, evenly apart. The other copies of a row stand for the kept one before them. Of a
    message, the receiver's lanes are kept. Of a collective among unlike replicas, those of the widest are.
    """
    columns, edges, whole = pipeline.columns, pipeline.edges, layout.most_lanes
    lanes = np.zeros(int(layout.placement.max()) + 1, dtype=np.int64)
    lanes[layout.placement] = np.array(own, dtype=np.int64)
    first_place = np.cumsum(lanes) - lanes

    def place(device: Ints, copy: Ints) -> Ints:
        places: Ints = np.where(device == NONE, NONE, first_place[device] + copy * lanes[device] // whole)
        return places

    kept = lanes[np.where(is_send(columns.kind), columns.peer, columns.rank)]
    meets = _meets_by_shard(layout, columns)
    kept = np.where(meets, np.array(layout.lanes, dtype=np.int64)[columns.stage], kept)
    apart, first = whole // kept, np.cumsum(kept) - kept
    row, number = numbered(kept)
    copy = number * apart[row]
    spread = replace(
        columns.take(row),
        rank=place(columns.rank[row], copy),
        peer=place(columns.peer[row], copy),
        part=np.where(meets[row], number, columns.part[row]),
    )
    # An edge is in every copy that keeps one of its ends. The end must then be on the rank of that copy: a
    # lane that sends nothing has no edge to the message of another lane.
    closer = np.minimum(apart[edges.source], apart[edges.target])
    edge, number = numbered(whole // closer)
    copy = number * closer[edge]
    ends, right = [], np.ones(len(edge), dtype=np.bool_)
    for end in (edges.source[edge], edges.target[edge]):
        index = copy // apart[end]
        ends.append(first[end] + index)
        device = columns.rank[end]
        right &= place(device, index * apart[end]) == place(device, copy)
    order = np.argsort(spread.rank, kind="stable")
    source, target = ends
    copied = Edges.of(source, target, edges.distance[edge]).take(right)
    return LoweredPipeline(spread.take(order), renumber(copied, order))
