"""The `equal-split` planner: as many layers in each stage, as the planner of PipeDream-2BW divides them.

It tries every depth and size of micro-batches (Narayanan et al., ICML 2021, section 4). All stages recompute
alike. Estimates are those of a row of stages: the slowest one has work all the time, but while it fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.describe.layout import Layout
from weft.describe.plan import Recompute
from weft.moves.partition import uniform_partition
from weft.planning.planners.base import Ranking
from weft.planning.planners.downsets import Question, Row
from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.part_plans import StageGraph, StageOfLayers
from weft.planning.planners.graphpipe.questions import partition_layouts
from weft.planning.planners.rows import ranked_rows
from weft.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSplitPlanner:
    """The best row of equal stages, over all depths and sizes of micro-batches."""

    name: ClassVar[str] = "equal-split"

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees and sizes of micro-batches; partitions add the stages."""
        return partition_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Divide the layers for each depth and size of micro-batches, and simulate the rows.

        Raises:
            InputError: for pins, goals and methods that a partition does not know.
        """
        return ranked_rows(problem, self.name, self.rows)

    def rows(self, costs: GraphCosts, questions: list[Question]) -> list[Row]:
        """Return a row for each question that has one, with each recomputation for all stages."""
        found = [_row(costs, one, word) for one in questions for word in one.words]
        return [one for one in found if one is not None]


def _row(costs: GraphCosts, one: Question, word: Recompute) -> Row | None:
    """Return equal stages on all devices; None if they do not fit, or a stage would be empty."""
    (degree,) = one.degrees
    depth = one.devices // degree
    counts = uniform_partition(costs.layers, depth)
    if counts is None:
        return None
    stages: list[StageOfLayers] = []
    samples: list[float] = []
    begin = 0
    for index, count in enumerate(counts):
        layers = tuple(range(begin, begin + count))
        begin += count
        own = costs.stage(layers, one.size, degree, word)
        in_flight = min(depth - index, costs.global_batch // (one.size * degree))
        if own.peak_bytes(in_flight) > costs.memory_bytes:
            return None
        stages.append(StageOfLayers(layers, degree, word, in_flight * one.size * degree))
        samples.append(costs.sample_s(own, one.size, degree))
    slowest_s = max(samples)
    graph = StageGraph(
        stages=tuple(stages),
        micro_batch_size=one.size,
        sample_s=slowest_s,
        in_flight=stages[0].in_flight,
    )
    # While a row fills, each stage waits for one micro-batch of those before it.
    filling_s = (sum(samples) - slowest_s) * one.size * degree / costs.global_batch
    return Row(slowest_s + filling_s, graph)
