"""SDP4Bit (Jia et al., arXiv 2410.15526): gradients on two levels, and changes of weights, in few bits.

Where nodes hold several replicas, neighbours add up a gradient inside their node first. A collective of its
own does that, on a stream of its own, so that it overlaps the reductions of other stages between the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.errors import Violation
from weft.methods.sdp4bit.kinds import REDUCE_INSIDE, ReducesInside
from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions, options_of
from weft.methods.sdp4bit.verify import check_inside
from weft.methods.sharding.groups import islands_of
from weft.methods.sharding.kinds import REDUCE
from weft.program.kinds import MAKES_GRADIENTS, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, replica_groups
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges

NOBODY = "one replica sends nothing"


def _two_levels(layout: PipelineLayout, options: Sdp4BitOptions) -> bool:
    return options.has_two_levels(layout.replicas)


def refuse(layout: PipelineLayout, options: Sdp4BitOptions, others: Mapping[str, Any]) -> list[Violation]:
    if layout.replicas == 1:
        return [Violation("sync", NOBODY, "dense")]
    if layout.replicas % options.replicas_per_node:
        problem = f"{layout.replicas} replicas are not whole nodes of {options.replicas_per_node}"
        return [Violation("sync", problem, "1")]
    return []


def reduce_inside(
    pipeline: LoweredPipeline, layout: PipelineLayout, options: Sdp4BitOptions
) -> LoweredPipeline:
    """Add a sum inside nodes before every reduction; both wait for the same backward passes."""
    if not _two_levels(layout, options):
        return pipeline
    columns, edges = pipeline.columns, pipeline.edges
    reductions = np.flatnonzero(columns.kind == REDUCE)
    row_of = np.full(len(columns), -1, dtype=np.int64)
    row_of[reductions] = len(columns) + np.arange(len(reductions), dtype=np.int64)
    added = Columns.of(
        len(reductions),
        kind=REDUCE_INSIDE,
        **{
            name: getattr(columns, name)[reductions]
            for name in ("stage", "part", "rank", "replica", "iteration", "bytes")
        },
    )
    made = (row_of[edges.target] >= 0) & is_any_of(columns.kind[edges.source], MAKES_GRADIENTS)
    into = Edges(source=edges.source[made], target=row_of[edges.target[made]], distance=edges.distance[made])
    new = Edges.join([into, Edges.of(row_of[reductions], reductions)])
    return insert(pipeline, added, reductions, np.full(len(reductions), -1, dtype=np.int64), new)


def groups(layout: PipelineLayout, options: Sdp4BitOptions) -> tuple[GroupTable, ...]:
    """Return the groups of neighbours inside nodes, lane by lane."""
    if not _two_levels(layout, options):
        return ()
    inside = [islands_of(stage.replicas, options.replicas_per_node) for stage in layout.stages]
    return (replica_groups((REDUCE_INSIDE,), layout, inside),)


def owes(layout: PipelineLayout, options: Sdp4BitOptions) -> ReducesInside | None:
    return ReducesInside(neighbours=options.replicas_per_node) if _two_levels(layout, options) else None


PASS = Pass(
    name=NAME,
    options=lambda plan, graph: options_of(plan),
    apply=reduce_inside,
    after=("sharding",),
    refuse=refuse,
    groups=groups,
    owes=owes,
    check=check_inside,
)
