"""1F1B on a graph of stages: a stage warms up by its distance from the end of the graph (GraphPipe).

The order is kFkB (GraphPipe, arXiv 2406.17145, section 6; Ada-Grouper, arXiv 2303.01675). A stage warms up
with its samples in flight, then runs k backwards and k forwards in turn. With k = 1, on a chain, it is 1F1B.
Branches of the graph run side by side. So a pipeline is as deep as its longest path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.ring import OneStagePerDevice, count_option, in_turn, refuse_count


def samples_in_flight(
    edges: Sequence[tuple[int, int]], sizes: Sequence[int], turns: Sequence[int], batch: int
) -> tuple[int, ...]:
    """Return the most samples that each stage keeps between their passes, at full speed.

    A stage keeps one turn of samples more than the stage behind it, of the longer of both turns. The rule
    reproduces the published cases of GraphPipe (arXiv 2406.17145, section 5 and figure 5).

    Args:
        edges: of the stage graph, from stages to later ones.
        sizes: the samples of each stage's micro-batches, of all its replicas together.
        turns: the micro-batches of each stage's turn, k of kFkB.
        batch: the samples of the pipeline in a step, which no stage exceeds.
    """
    readers: list[list[int]] = [[] for _ in sizes]
    for producer, consumer in edges:
        readers[producer].append(consumer)
    turn = [size * count for size, count in zip(sizes, turns, strict=True)]
    kept = [0] * len(sizes)
    for stage in reversed(range(len(sizes))):
        behind = [kept[reader] + max(turn[stage], turn[reader]) for reader in readers[stage]]
        whole = -(-max(behind, default=turn[stage]) // sizes[stage]) * sizes[stage]
        kept[stage] = min(whole, batch)
    return tuple(kept)


class GraphOneForwardOneBackward(OneStagePerDevice):
    """One stage per device; 1F1B in which branches of the stage graph run side by side."""

    name: ClassVar[str] = "graph-1f1b"
    synonyms: ClassVar[tuple[str, ...]] = ("kFkB", "graphpipe", "graph-pipeline-parallelism")
    options: ClassVar[Mapping[str, str]] = {"k": "micro-batches in a turn forward and in one backward"}
    for_graphs: ClassVar[bool] = True
    deals: ClassVar[bool] = True

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        return super().refuse(pipeline, options) or refuse_count(self.name, "k", options)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        turn = count_option("k", options, 1)
        copies, count = pipeline.stage_copies, pipeline.micro_batches
        turns = [turn] * pipeline.stages
        kept = samples_in_flight(pipeline.stage_edges, copies, turns, count)[device] // copies[device]
        count //= copies[device]
        micro_batch = np.arange(count, dtype=np.int64)
        forward: Ints = np.where(micro_batch < kept, -1, 2 * ((micro_batch - kept) // turn) + 1)
        kind, number = in_turn(count, {FORWARD: forward, BACKWARD: 2 * (micro_batch // turn)})
        return ComputeOrder(kind, np.full_like(kind, device), number)
