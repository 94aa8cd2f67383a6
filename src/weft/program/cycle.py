"""A cycle of several steps: the pipeline of one step, repeated, and what reaches from step to step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.program.lower import LoweredPipeline, renumber
from weft.program.program import Columns, Edges


def repeated(pipeline: LoweredPipeline, steps: int) -> LoweredPipeline:
    """The pipeline of one step as a cycle of `steps`, device by device and, on a device, step by step.

    An edge that reaches d steps on leads from step i of the cycle to step (i + d) mod `steps`, in the cycle
    that is (i + d) div `steps` later.
    """
    if steps == 1:
        return pipeline
    columns, edges = pipeline.columns, pipeline.edges
    rows = len(columns)
    iteration = np.repeat(np.arange(steps, dtype=np.int64), rows)
    copies = replace(Columns.join([columns] * steps), iteration=iteration)
    # A stable sort, so that rows of one device and step keep their order.
    order = np.lexsort((copies.iteration, copies.rank))
    source, target, distance = (np.tile(one, steps) for one in (edges.source, edges.target, edges.distance))
    step = np.repeat(np.arange(steps, dtype=np.int64), len(edges))
    later = step + distance
    reaching = Edges(
        source=source + step * rows, target=target + later % steps * rows, distance=later // steps
    )
    return LoweredPipeline(copies.take(order), renumber(reaching, order))
