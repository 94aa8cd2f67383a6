"""The `pipedream` planner: the optimizer of PipeDream (Narayanan et al., SOSP 2019, section 3.1).

It cuts any graph of layers into stages in a row. Its states are the antichains of the graph. An antichain
ends a set of layers with all that these read. A stage is the difference of two sets. The paper and its
published program differ, so both are here. One level of the hierarchy of links is enough: all links
are like the slowest one.

Stages run by synchronous 1F1B, as in the comparison of GraphPipe (arXiv 2406.17145, section 7.1). So replicas
reduce gradients once a step. A stage keeps one micro-batch for each stage from it to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from weft.describe.layer_graph import chain_edges
from weft.describe.layout import Layout
from weft.planning.planners.base import Ranking
from weft.planning.planners.downsets import Question, Row, RowSearch, Sums, downsets
from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.questions import partition_layouts
from weft.planning.planners.rows import ranked_rows
from weft.planning.problem import Problem
from weft.program.arrays import Floats

Variant = Literal["paper", "code"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPrice:
    """PipeDream's seconds of a stage.

    Attributes:
        bytes_per_s: the bandwidth of every link.
        variant: the paper takes the slower of computing and reducing, and counts messages between stages.
            The program adds both, reduces with two transfers more, and counts no messages.
        every_micro_batch: True if replicas reduce gradients of every micro-batch, as the asynchronous
            original does.
    """

    bytes_per_s: float
    variant: Variant = "paper"
    every_micro_batch: bool = False

    def __call__(self, sums: Sums, replicas: int, micro_batches: float) -> Floats:
        share = 1.0 if self.every_micro_batch else replicas / micro_batches
        reduced_s = share * (replicas - 1) * sums.reduced_bytes / self.bytes_per_s
        if self.variant == "code":
            return (sums.computed_s + 4.0 * reduced_s / replicas) / replicas
        own_s: Floats = np.maximum(sums.computed_s, 2.0 * reduced_s) / replicas
        return np.maximum(own_s, 2.0 * sums.border_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPlanner:
    """PipeDream's partition for every size of micro-batches.

    Attributes:
        variant: see `PipeDreamPrice`.
        states: the most antichains. A graph with more is cut as a chain of its layers in their order.
    """

    name: ClassVar[str] = "pipedream"
    variant: Variant = "paper"
    states: int = 1_000

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees and sizes of micro-batches; partitions add the stages."""
        return partition_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Partition the layers for each size of micro-batches, and simulate the partitions.

        The original takes the size as given, and recomputes nothing. Here the simulator ranks the sizes, and
        with every stage recomputing alike.

        Raises:
            InputError: for pins, goals and methods that a partition does not know.
        """
        return ranked_rows(problem, self.name, self.rows, unlike=True)

    def rows(self, costs: GraphCosts, questions: list[Question]) -> list[Row]:
        """Return the partition of each question, with each recomputation for all stages."""
        sets = downsets(costs.layers, costs.edges, self.states)
        if sets is None:
            sets = downsets(costs.layers, chain_edges(costs.layers), costs.layers + 1)
            assert sets is not None, "a chain has one downset more than layers"
        price = PipeDreamPrice(bytes_per_s=costs.link.bytes_per_s, variant=self.variant)
        alike = [one._replace(words=(word,)) for one in questions for word in one.words]
        return RowSearch(costs=costs, sets=sets, price=price).rows(alike)
