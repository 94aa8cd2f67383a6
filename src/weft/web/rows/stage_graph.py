"""The stages of a plan as a graph, in words: each with the reasons for its time and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.describe.layer_graph import chain_edges
from weft.describe.units import counted, format_bytes, format_seconds
from weft.planning.planned_job import PlannedJob
from weft.program.arrays import Floats
from weft.program.kinds import STEP, is_compute
from weft.timeline.figures import peak_in_flight
from weft.web.rows.plan import layers_text, ranks_of, ranks_text


class StageNode(NamedTuple):
    """A stage in words.

    Attributes:
        lines: its name, layers and ranks.
        reasons: sentences on what fills its time and its memory.
        work: its computing time over that of the slowest stage, 0 to 1.
        memory: the peak of its fullest rank over the memory of that rank's device.
    """

    lines: tuple[str, ...]
    reasons: tuple[str, ...]
    work: float
    memory: float


class StageDiagram(NamedTuple):
    """The stages of a plan, and the edges from stages to later ones that read them."""

    nodes: tuple[StageNode, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def to_end(self) -> tuple[int, ...]:
        """Each stage's number of stages on its longest path to the end, itself included."""
        found = [1] * len(self.nodes)
        for producer, consumer in sorted(self.edges, reverse=True):
            found[producer] = max(found[producer], found[consumer] + 1)
        return tuple(found)


def stage_graph(planned: PlannedJob) -> StageDiagram | None:
    """Return the graph of a plan's stages with its prediction in words; None if they form a chain."""
    plan, graph = planned.plan, planned.problem.job.graph
    edges = tuple(sorted(graph.crossing(stage.layers for stage in plan.stages)))
    if edges == chain_edges(len(plan.stages)):
        return None
    facts = _Facts(planned, edges)
    return StageDiagram(tuple(map(facts.node, range(len(plan.stages)))), edges)


class _Facts:
    """The figures of a plan's prediction, stage by stage."""

    def __init__(self, planned: PlannedJob, edges: Sequence[tuple[int, int]]) -> None:
        self._plan, self._layers = planned.plan, planned.problem.job.graph.layers
        self._edges = edges
        self._peak, self._memory = planned.prediction.peak_bytes, planned.memory_bytes
        held = peak_in_flight(planned.program)
        self._held = [held[ranks_of(stage)[0]] for stage in self._plan.stages]
        self._seconds = _computing_s(planned)
        self._longest_s = max(float(self._seconds.max()), 1e-12)

    def node(self, index: int) -> StageNode:
        plan, stage = self._plan, self._plan.stages[index]
        ranks, copies = ranks_of(stage), len(stage.replicas)
        fullest = max(ranks, key=lambda rank: self._peak[rank] / self._memory[rank])
        share = self._peak[fullest] / self._memory[fullest]
        peak = format_bytes(self._peak[fullest])
        size = f"micro-batches of {counted(plan.size_of(index), 'sample')}, recompute {stage.recompute}"
        return StageNode(
            lines=(f"stage {index}", layers_text(sorted(stage.layers), self._layers), ranks_text(ranks)),
            reasons=(
                f"{counted(copies, 'replica')}, {size}",
                self._time_words(index),
                self._held_words(index),
                f"peak memory {peak} on rank {fullest}, {share:.0%} of its device",
            ),
            work=float(self._seconds[index]) / self._longest_s,
            memory=share,
        )

    def _time_words(self, index: int) -> str:
        slowest = int(self._seconds.argmax())
        time = f"a rank computes {format_seconds(float(self._seconds[index]))} of a step"
        if index == slowest:
            return f"{time}: the slowest stage, which the others wait for"
        return f"{time}, {self._seconds[index] / self._longest_s:.0%} of the slowest, stage {slowest}"

    def _held_words(self, index: int) -> str:
        count = self._held[index]
        kept = f"a rank keeps up to {count} micro-batch{'es' * (count != 1)} in flight"
        readers = [consumer for producer, consumer in self._edges if producer == index]
        if not readers:
            return f"{kept}: no stage reads it"
        most = max(readers, key=lambda reader: self._held[reader])
        return f"{kept}; stage {most}, which reads it, {self._held[most]}"


def _computing_s(planned: PlannedJob) -> Floats:
    """Return the seconds that a rank of each stage computes in a step, without the optimizer."""
    timeline, plan = planned.predicted.simulation.timeline, planned.plan
    rows = is_compute(timeline.kind) & (timeline.kind != STEP) & (timeline.stage >= 0)
    lengths = (timeline.end_ns - timeline.start_ns)[rows]
    total_ns = np.bincount(timeline.stage[rows], weights=lengths, minlength=len(plan.stages))
    ranks = np.array([len(ranks_of(stage)) for stage in plan.stages])
    seconds: Floats = total_ns / (1e9 * ranks * planned.program.steps_per_cycle)
    return seconds
