"""The clipping of micro-batches in a program: three instructions around each clipped gradient.

A stage near the end of a pipeline goes back before the first stage does. So the norm of a micro-batch is
known some passes later, and its gradient waits beside the computations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.micro_batch_clipping.kinds import (
    BOUND_GRADIENT,
    CLIP_GRADIENT,
    TAKE_GRADIENT,
    ClipsMicroBatches,
)
from weft.methods.micro_batch_clipping.options import NAME, TABLE_NAME, options_of
from weft.program.arrays import Ints
from weft.program.codes import distinct_rows
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, KINDS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.insert import after_sends, insert
from weft.program.passes.meeting import meeting_groups
from weft.program.program import Columns, Edges

# One fp64 number: a sum of squares, or a norm.
NUMBER_BYTES = 8
WHOLE_PASSES = "a gradient is taken when all of it is made, and split backward passes make two parts"
ONE_STAGE = "a gradient is bounded after the last pass of its device, which has other stages"


@dataclass(frozen=True, slots=True)
class Clipped:
    """The number of the plan's micro-batches in a clipped one, and of sources with their own bound."""

    together: int
    sources: int


def options(plan: Plan, graph: LayerGraph) -> Clipped | None:
    table = options_of(plan)
    if table is None:
        return None
    return Clipped(max(1, table.samples // plan.micro_batch_size), table.sources)


def refuse(layout: PipelineLayout, clipped: Clipped, others: Mapping[str, Any]) -> list[Violation]:
    problems = []
    if "tying" in others:
        problem = "stages with copies of one weight see parts of its gradient, of which no square adds up"
        problems.append(Violation(TABLE_NAME, problem, "pp 1"))
    if "tensor-collectives" in others:
        problem = "passes in segments make a gradient in several parts; let tensor ranks exchange inside"
        problems.append(Violation(TABLE_NAME, problem, 'plan.tensor_exchanges = "inside"'))
    if any(stage.splits > 1 for stage in layout.stages):
        problems.append(
            Violation(TABLE_NAME, "stages that split micro-batches make gradients of parts", "no splits")
        )
    odd = [share for share in layout.micro_batches if share % clipped.together]
    if odd:
        problem = f"{odd[0]} micro-batches of a replica are not whole groups of {clipped.together}"
        problems.append(Violation(TABLE_NAME, problem))
    return problems


def clip(pipeline: LoweredPipeline, layout: PipelineLayout, clipped: Clipped) -> LoweredPipeline:
    """Add the instructions to one pipeline.

    Raises:
        InputError: for orders with split backward passes, or with several stages on a device.
    """
    columns = pipeline.columns
    if (columns.kind == BACKWARD_INPUT).any():
        raise InputError(Violation(NAME, WHOLE_PASSES, "1f1b"))
    backs = np.flatnonzero(columns.kind == BACKWARD)
    group = columns.micro_batch[backs] // clipped.together
    first, group_of = distinct_rows(columns.rank[backs], columns.stage[backs], columns.replica[backs], group)
    last: Ints = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(last, group_of, backs)
    devices, device_of = np.unique(columns.rank[last], return_inverse=True)
    if len(devices) < len(distinct_rows(columns.rank[last], columns.stage[last])[0]):
        raise InputError(Violation(NAME, ONE_STAGE, "one stage for each device"))
    count, bounds = len(first), len(devices)
    take, cut, bound = np.split(len(columns) + np.arange(2 * count + bounds), [count, 2 * count])
    # Groups of a device are in rising order.
    later = np.flatnonzero(device_of[:-1] == device_of[1:]) + 1
    before = np.full(count, -1, dtype=np.int64)
    before[later] = take[later - 1]
    waits = before[group_of] >= 0
    users = np.flatnonzero(is_any_of(columns.kind, (KINDS.code("reduce"), KINDS.code("norm"), STEP)))
    edges = [
        Edges.of(backs, take[group_of]),
        Edges.of(before[group_of][waits], backs[waits]),
        Edges.of(take, cut),
        Edges.of(cut, bound[device_of]),
        Edges.of(bound[np.searchsorted(devices, columns.rank[users])], users),
    ]
    # The last group of each device.
    ends = np.searchsorted(device_of, np.arange(bounds), side="right") - 1
    numbers = sum(layout.micro_batches) // clipped.together
    added = Columns.join(
        [
            _beside(columns, last, TAKE_GRADIENT, part=group[first]),
            _beside(columns, last, CLIP_GRADIENT, part=group[first], bytes=NUMBER_BYTES),
            _beside(columns, last[ends], BOUND_GRADIENT, bytes=NUMBER_BYTES * numbers),
        ]
    )
    anchors = after_sends(columns, last)
    turns = np.repeat([1, 2, 3], [count, count, bounds])
    return insert(
        pipeline, added, np.concatenate([anchors, anchors, anchors[ends]]), turns, Edges.join(edges)
    )


def _beside(columns: Columns, rows: Ints, kind: int, **own: Ints | int) -> Columns:
    """Return new rows of a kind with the stage, replica and device of other rows."""
    shared = {name: getattr(columns, name)[rows] for name in ("stage", "replica", "rank")}
    return Columns.of(len(rows), kind=kind, **shared, **own)


def groups(layout: PipelineLayout, clipped: Clipped) -> Sequence[GroupTable]:
    return (
        *meeting_groups(layout, CLIP_GRADIENT, by_replica=True),
        *meeting_groups(layout, BOUND_GRADIENT),
    )


PASS = Pass(
    name=NAME,
    options=options,
    apply=clip,
    after=("sharding", "tying", "blocking", "gradient-norm"),
    refuse=refuse,
    groups=groups,
    owes=lambda layout, clipped: ClipsMicroBatches(together=clipped.together, sources=clipped.sources),
)
