"""The clipping of micro-batches in a program: three instructions around each clipped gradient.

A gradient is complete after its last weight part, and its norm after that of the first stage. Stages near the
end of a pipeline go back before. So their gradients wait beside the computations. A device with several
stages reduces none of them before it has made all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.micro_batch_clipping.kinds import (
    BOUND_GRADIENT,
    BOUND_KINDS,
    BOUND_STAGE,
    CLIP_GRADIENT,
    CLIP_KINDS,
    CLIP_STAGE,
    TAKE_GRADIENT,
    ClipsMicroBatches,
)
from weft.methods.micro_batch_clipping.options import NAME, TABLE_NAME, options_of
from weft.program.arrays import Ints
from weft.program.codes import codes, distinct_rows
from weft.program.kinds import BACKWARD_INPUT, COMPUTATIONS, KINDS, MAKES_GRADIENTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.cutting import refuse_turns
from weft.program.passes.insert import after_sends, insert, moved_behind
from weft.program.passes.meeting import meeting_groups
from weft.program.places import join
from weft.program.program import Columns, Edges

# One fp64 number: a sum of squares, or a norm.
NUMBER_BYTES = 8
IN_TURN = "a gradient is taken before the next one of its stage begins, and this order mixes them"
TURNS = "stages take turns in two buffers of gradients, which are needed to the end of a step"


@dataclass(frozen=True, slots=True)
class Clipped:
    """The number of the plan's micro-batches in a clipped one, and of sources with their own bound.

    `by_stage`: stages clip by norms of their own.
    """

    together: int
    sources: int
    by_stage: bool = False


def options(plan: Plan, graph: LayerGraph) -> Clipped | None:
    table = options_of(plan)
    if table is None:
        return None
    return Clipped(max(1, table.samples // plan.micro_batch_size), table.sources, table.by_stage)


def refuse(layout: PipelineLayout, clipped: Clipped, others: Mapping[str, Any]) -> list[Violation]:
    problems = refuse_turns(TABLE_NAME, "mix the gradients of two micro-batches", others)
    if "tying" in others:
        problem = "stages with copies of one weight see parts of its gradient, of which no square adds up"
        problems.append(Violation(TABLE_NAME, problem, "pp 1"))
    if layout.paths > 1:
        problem = "a rank holds stages of several replicas, whose norms are taken apart"
        problems.append(Violation(TABLE_NAME, problem, "schedule 1f1b"))
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
        InputError: for orders that mix the gradients of clipped micro-batches, or stages that share buffers.
    """
    pipeline = pipeline if clipped.by_stage else _reducing_last(pipeline)
    columns, rank = pipeline.columns, pipeline.columns.rank
    # The stages of a device have one norm, or each has its own.
    part = columns.stage if clipped.by_stage else np.zeros_like(columns.stage)
    makers = _makers(columns, layout)
    group = columns.micro_batch[makers] // clipped.together
    taken = _Sums.of_rows(makers, group, rank[makers], columns.stage[makers], group)
    cuts = _Sums.of_rows(taken.last, taken.number, rank[taken.last], part[taken.last], taken.number)
    bounds = _Sums.of_rows(cuts.last, cuts.number, rank[cuts.last], part[cuts.last])
    _require_turns(columns, makers, taken, cuts, part)
    counts = [len(one.last) for one in (taken, cuts, bounds)]
    take, cut, bound = np.split(len(columns) + np.arange(sum(counts)), np.cumsum(counts)[:-1])
    # The first gradient of a stage waits for none.
    waits = taken.number[taken.of] > 0
    used, users = _uses(columns, part, bounds.last)
    edges = [
        Edges.of(makers, take[taken.of]),
        Edges.of(take[taken.of[waits] - 1], makers[waits]),
        Edges.of(take, cut[cuts.of]),
        Edges.of(cut, bound[bounds.of]),
        Edges.of(bound[used], users),
    ]
    numbers = sum(layout.micro_batches) // clipped.together
    # Collectives have the coordinates of their first stage.
    first = makers[taken.first][cuts.first]
    added = Columns.join(
        [
            _beside(columns, taken.last, TAKE_GRADIENT, part=taken.number),
            _beside(columns, first, CLIP_KINDS[clipped.by_stage], part=cuts.number, bytes=NUMBER_BYTES),
            _beside(
                columns, first[bounds.first], BOUND_KINDS[clipped.by_stage], bytes=NUMBER_BYTES * numbers
            ),
        ]
    )
    anchors = after_sends(columns, np.concatenate([taken.last, cuts.last, bounds.last]))
    return insert(pipeline, added, anchors, np.repeat([1, 2, 3], counts), Edges.join(edges))


class _Sums(NamedTuple):
    """Sets of rows, sorted by their coordinates.

    Attributes:
        of: the set of each row.
        first, last: by set, the index of its first row, and its last row.
        number: by set, the clipped micro-batch of its rows.
    """

    of: Ints
    first: Ints
    last: Ints
    number: Ints

    @classmethod
    def of_rows(cls, rows: Ints, number: Ints, *coordinates: Ints) -> _Sums:
        some, of = distinct_rows(*coordinates)
        first, last = np.full(len(some), len(rows), dtype=np.int64), np.zeros(len(some), dtype=np.int64)
        np.minimum.at(first, of, np.arange(len(rows), dtype=np.int64))
        np.maximum.at(last, of, rows)
        return cls(of, first, last, number[some])


def _uses(columns: Columns, part: Ints, bounded: Ints) -> tuple[Ints, Ints]:
    """Return pairs of a bounded part, by its index in the rows `bounded`, and a row that uses it.

    The norm of a step's gradient is of all parts of a device.
    """
    norms = np.flatnonzero(columns.kind == KINDS.code("norm"))
    whole, of_part = join(columns.rank[norms], columns.rank[bounded])
    others = np.flatnonzero(is_any_of(columns.kind, _users()) & (columns.kind != KINDS.code("norm")))
    both = np.concatenate([others, bounded])
    place = codes(columns.rank[both], part[both])
    each, of_other = join(place[: len(others)], place[len(others) :])
    return np.concatenate([of_part, of_other]), np.concatenate([norms[whole], others[each]])


def _users() -> tuple[int, ...]:
    """Return the kinds that use the gradient of a step."""
    return KINDS.code("reduce"), KINDS.code("norm"), STEP


def _makers(columns: Columns, layout: PipelineLayout) -> Ints:
    """Return the passes that add to gradients; in stages that read samples, input parts do so, too."""
    inputs = (columns.kind == BACKWARD_INPUT) & np.isin(columns.stage, layout.sources or layout.unfed)
    return np.flatnonzero(is_any_of(columns.kind, MAKES_GRADIENTS) | inputs)


def _reducing_last(pipeline: LoweredPipeline) -> LoweredPipeline:
    """Return the pipeline with reductions behind the last backward pass of their device.

    Only then the device knows the norms of the step.
    """
    columns, edges = pipeline.columns, pipeline.edges
    makers = np.flatnonzero(is_any_of(columns.kind, MAKES_GRADIENTS))
    last = np.zeros(int(columns.rank.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(last, columns.rank[makers], makers)
    early = np.arange(len(columns)) < last[columns.rank]
    within = (edges.distance == 0) & (columns.rank[edges.source] == columns.rank[edges.target])
    moved, count = early & is_any_of(columns.kind, _users()), -1
    while moved.sum() > count:
        count = moved.sum()
        moved[edges.target[within & moved[edges.source]]] = True
        moved &= early
    if is_any_of(columns.kind[moved], COMPUTATIONS).any():
        raise InputError(Violation(TABLE_NAME, TURNS, "sharding zero-1"))
    return moved_behind(pipeline, moved, after_sends(columns, last)[columns.rank])


def _require_turns(columns: Columns, makers: Ints, taken: _Sums, cuts: _Sums, part: Ints) -> None:
    """Check that stages make gradients one after the other, and that norms are complete in this order."""
    order = np.lexsort((makers, columns.stage[makers], columns.rank[makers]))
    together = np.diff(part[cuts.last]) == 0
    if (np.diff(taken.of[order]) < 0).any() or (np.diff(cuts.last)[together] < 0).any():
        raise InputError(Violation(NAME, IN_TURN, "1f1b"))


def _beside(columns: Columns, rows: Ints, kind: int, **own: Ints | int) -> Columns:
    """Return new rows of a kind with the stage, replica and device of other rows."""
    shared = {name: getattr(columns, name)[rows] for name in ("stage", "replica", "rank")}
    return Columns.of(len(rows), kind=kind, **shared, **own)


def groups(layout: PipelineLayout, clipped: Clipped) -> Sequence[GroupTable]:
    if clipped.by_stage:
        return _groups_of_stages(layout)
    return (
        *meeting_groups(layout, CLIP_GRADIENT, by_replica=True),
        *meeting_groups(layout, BOUND_GRADIENT),
    )


def _groups_of_stages(layout: PipelineLayout) -> Sequence[GroupTable]:
    """Return the ranks of each replica of a stage, and those of all its replicas; no rank of another."""
    tables = np.stack(layout.rank_tables)
    stages, replicas, lanes = tables.shape
    rows = [tuple(sorted(one)) for one in tables.reshape(-1, lanes).tolist()]
    alike = [tuple(sorted(one)) for one in tables.reshape(stages, -1).tolist()]
    # Stages on the same ranks share groups.
    parts, wholes = tuple(dict.fromkeys(rows)), tuple(dict.fromkeys(alike))
    part = np.array([parts.index(one) for one in rows], dtype=np.int64).reshape(stages, replicas, 1)
    whole = np.array([wholes.index(one) for one in alike], dtype=np.int64).reshape(stages, 1)
    return (
        GroupTable(
            kinds=(CLIP_STAGE,),
            groups=parts,
            by=("stage", "replica"),
            table=np.repeat(part, lanes, axis=2),
        ),
        GroupTable(kinds=(BOUND_STAGE,), groups=wholes, by=("stage",), table=np.repeat(whole, lanes, axis=1)),
    )


def owes(layout: PipelineLayout, clipped: Clipped) -> ClipsMicroBatches:
    return ClipsMicroBatches(
        together=clipped.together,
        sources=clipped.sources,
        first_stages=layout.sources or layout.unfed,
        apart=len(layout.stages) - layout.frozen_stages if clipped.by_stage else 0,
    )


PASS = Pass(
    name=NAME,
    options=options,
    apply=clip,
    after=("sharding", "tying", "blocking", "gradient-norm"),
    refuse=refuse,
    groups=groups,
    owes=owes,
)
