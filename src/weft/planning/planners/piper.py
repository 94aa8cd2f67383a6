"""The `piper` planner: the dynamic program of Piper (Tarnawski et al., NeurIPS 2021).

It takes stages off the downsets of any graph of layers, and each stage chooses its recomputation. The
original chooses it for every layer, and searches tensor ranks, too. Here they are as pinned, else one. A
graph with too many downsets has no plan, as in the original.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.describe.layout import Layout
from weft.planning.planners.base import Ranking
from weft.planning.planners.downsets import Question, Row, RowSearch, Sums, downsets
from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.questions import partition_layouts
from weft.planning.planners.rows import ranked_rows
from weft.planning.problem import Problem
from weft.program.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperPrice:
    """Piper's seconds of a stage: computing, messages over all edges and the gradients of a step, added."""

    bytes_per_s: float

    def __call__(self, sums: Sums, replicas: int, micro_batches: float) -> Floats:
        reduced = 4.0 * (replicas - 1) * sums.reduced_bytes / (replicas * micro_batches)
        sent = 2.0 * sums.crossing_bytes / replicas
        return sums.computed_s / replicas + (sent + reduced) / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperPlanner:
    """Piper's partition for every size of micro-batches.

    Attributes:
        downsets: the most that the graph may have, as in the published program.
        stages: the most stages to price. They bound the time; the same problem has the same answer.
    """

    name: ClassVar[str] = "piper"
    downsets: int = 40_000
    stages: int = 20_000_000

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees and sizes of micro-batches; partitions add the stages."""
        return partition_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Partition the layers for each size of micro-batches, and simulate the partitions.

        The original takes the size as given. Here the simulator ranks the sizes.

        Raises:
            InputError: for pins, goals and methods that a partition does not know.
        """
        return ranked_rows(problem, self.name, self.rows, unlike=True)

    def rows(self, costs: GraphCosts, questions: list[Question]) -> list[Row] | str:
        """Return the partition of each question, or the reason why there is none."""
        sets = downsets(costs.layers, costs.edges, self.downsets)
        if sets is None:
            return f"no plan: the graph has more than {self.downsets:,} downsets"
        price = PiperPrice(bytes_per_s=costs.link.bytes_per_s)
        return RowSearch(costs=costs, sets=sets, price=price, budget=self.stages).rows(questions)
