"""Weights that several stages use at once: copies whose gradients are added before any of them steps.

Every holder of a copy adds its gradients to those of all other holders, in all replicas, by a reduction of
their own beside those of the stages. It comes last of a device's collectives, when everything it waits for
is under way; all copies then step with the same gradient and stay equal bit by bit (Narayanan et al.,
Megatron-LM, arXiv 2104.04473, for the embedding on the first and the last stage).
"""

from __future__ import annotations

import numpy as np

from weft.program.buffers import MAKES_GRADIENTS
from weft.program.kinds import REDUCE_TIED, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges, Ints


def tie(pipeline: LoweredPipeline, layout: PipelineLayout) -> LoweredPipeline:
    """Add the reductions of the layout's tied weights to one pipeline: one on every device with a copy.

    A device with several copies has added them up before; its reduction has the coordinates of the first.
    """
    columns = pipeline.columns
    steps = np.flatnonzero(columns.kind == STEP)
    makers = np.flatnonzero(is_any_of(columns.kind, MAKES_GRADIENTS))
    rows: list[tuple[int, int, int, int, int, int]] = []
    edges: list[Edges] = []
    for part, weights in enumerate(layout.tied):
        stepped = steps[np.isin(columns.stage[steps], weights.stages)]
        made = makers[np.isin(columns.stage[makers], weights.stages)]
        for device in np.unique(columns.rank[stepped]).tolist():
            here = stepped[columns.rank[stepped] == device]
            first = here[np.argmin(columns.stage[here])]
            anchor = steps[np.searchsorted(columns.rank[steps], device)]
            new = len(columns) + len(rows)
            rows.append(
                (
                    int(columns.stage[first]),
                    int(columns.replica[first]),
                    part,
                    device,
                    weights.gradient_bytes,
                    int(anchor),
                )
            )
            before = made[columns.rank[made] == device]
            edges += [
                Edges.of(before, np.full(len(before), new)),
                Edges.of(np.full(len(here), new), here),
            ]
    stage, replica, number, device_of, size, anchors = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    added = Columns.of(
        len(rows), kind=REDUCE_TIED, stage=stage, replica=replica, part=number, rank=device_of, bytes=size
    )
    return insert(pipeline, added, anchors, _before(anchors), Edges.join(edges))


def _before(anchors: Ints) -> Ints:
    """Turns that keep rows in their order, all before their anchors."""
    turns: Ints = np.arange(len(anchors), dtype=np.int64) - len(anchors)
    return turns
