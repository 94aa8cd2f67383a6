"""SDP4Bit (Jia et al., arXiv 2410.15526): gradients on two levels, and changes of weights, in few bits.

Where nodes hold several replicas, neighbours add up a gradient inside their node first. Collectives of their
own do that, on a stream of their own. So they overlap the reductions between nodes of other stages, and of
other slices of the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from weft.describe.synchronisation import options_in
from weft.errors import Violation
from weft.methods.sdp4bit.kinds import REDUCE_BETWEEN, REDUCE_INSIDE, ReducesInside
from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions
from weft.methods.sdp4bit.verify import check_inside
from weft.methods.sharding.groups import islands_of
from weft.methods.sharding.kinds import REDUCE
from weft.moves.synchronisation import NOBODY
from weft.program.arrays import Ints
from weft.program.kinds import MAKES_GRADIENTS, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, replica_groups
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges


def _two_levels(layout: PipelineLayout, options: Sdp4BitOptions) -> bool:
    return options.has_two_levels(layout.replicas)


def refuse(layout: PipelineLayout, options: Sdp4BitOptions, others: Mapping[str, Any]) -> list[Violation]:
    if layout.replicas == 1:
        return [Violation("sync", NOBODY, "dense")]
    if layout.replicas % options.replicas_per_node:
        problem = f"{layout.replicas} replicas cannot make whole nodes of {options.replicas_per_node}"
        return [Violation("sync", problem, "1")]
    return []


def on_two_levels(
    pipeline: LoweredPipeline, layout: PipelineLayout, options: Sdp4BitOptions
) -> LoweredPipeline:
    """Put the sums inside nodes before every reduction, and its sums between nodes but the last.

    All sums inside nodes wait for the backward passes that the reduction waits for.
    """
    if not _two_levels(layout, options):
        return pipeline
    columns, edges, slices = pipeline.columns, pipeline.edges, options.slices
    reductions = np.flatnonzero(columns.kind == REDUCE)
    count = len(reductions)
    inside = len(columns) + np.arange(count * slices).reshape(count, slices)
    between = len(columns) + inside.size + np.arange(count * (slices - 1)).reshape(count, slices - 1)
    # The sum between nodes of each slice; the last one is the reduction.
    ends = np.concatenate([between, reductions[:, None]], axis=1)
    added = Columns.join(
        [
            _sums(columns, reductions, slices, REDUCE_INSIDE, slices),
            _sums(columns, reductions, slices, REDUCE_BETWEEN, slices - 1),
        ]
    )
    of_row = np.full(len(columns), -1, dtype=np.int64)
    of_row[reductions] = np.arange(count)
    made = (of_row[edges.target] >= 0) & is_any_of(columns.kind[edges.source], MAKES_GRADIENTS)
    makers = np.repeat(edges.source[made], slices)
    new = [
        Edges.of(makers, inside[of_row[edges.target[made]]].ravel()),
        Edges.of(inside.ravel(), ends.ravel()),
        Edges.of(between.ravel(), np.repeat(reductions, slices - 1)),
    ]
    last = np.where(columns.kind == REDUCE, _slice_bytes(columns.bytes, slices, slices - 1), columns.bytes)
    sized = LoweredPipeline(replace(columns, bytes=last, most_bytes=last), edges)
    # In the order of their slices, all sums inside first.
    turns = [np.arange(-2 * slices, -slices), np.arange(-slices, -1)]
    anchors = [np.repeat(reductions, slices), np.repeat(reductions, slices - 1)]
    turn = np.concatenate([np.tile(one, count) for one in turns])
    return insert(sized, added, np.concatenate(anchors), turn, Edges.join(new))


def _sums(columns: Columns, reductions: Ints, slices: int, kind: int, count: int) -> Columns:
    """Return the rows of the first `count` of the `slices` of each reduction."""
    of, number = np.repeat(reductions, count), np.tile(np.arange(count), len(reductions))
    return Columns.of(
        len(of),
        kind=kind,
        part=columns.part[of] * slices + number,
        bytes=_slice_bytes(columns.bytes[of], slices, number),
        **{name: getattr(columns, name)[of] for name in ("stage", "rank", "replica", "iteration")},
    )


def _slice_bytes(whole: Ints, slices: int, number: Ints | int) -> Ints:
    """Return the bytes of a slice; slices of one whole differ by one byte at most."""
    found: Ints = whole * (number + 1) // slices - whole * number // slices
    return found


def groups(layout: PipelineLayout, options: Sdp4BitOptions) -> tuple[GroupTable, ...]:
    """Return the groups of neighbours inside nodes, lane by lane."""
    if not _two_levels(layout, options):
        return ()
    inside = [islands_of(stage.replicas, options.replicas_per_node) for stage in layout.stages]
    everyone = [[list(range(layout.replicas))]] * len(layout.stages)
    tables = (replica_groups((REDUCE_INSIDE,), layout, inside),)
    return tables if options.slices == 1 else (*tables, replica_groups((REDUCE_BETWEEN,), layout, everyone))


def owes(layout: PipelineLayout, options: Sdp4BitOptions) -> ReducesInside | None:
    if not _two_levels(layout, options):
        return None
    return ReducesInside(neighbours=options.replicas_per_node, slices=options.slices)


PASS = Pass(
    name=NAME,
    options=lambda plan, graph: options_in(plan, NAME, Sdp4BitOptions),
    apply=on_two_levels,
    after=("sharding",),
    refuse=refuse,
    groups=groups,
    owes=owes,
    check=check_inside,
)
