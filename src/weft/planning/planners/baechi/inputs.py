"""From a problem to the operators and devices of its placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.describe.plan import Recompute
from weft.planning.placement.graph import Communication, Devices, OperatorGraph
from weft.planning.planners.graph_costs import GraphCosts, graph_costs
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints

TICKS_PER_S = 1_000_000_000
# Long enough for the bandwidth to decide.
_PROBE_BYTES = 2**28


@dataclass(frozen=True)
class PlacementInputs:
    """The layers of a problem as operators, for micro-batches of any size.

    An operator takes the time of both passes. A tensor takes that of its message and of the gradient in
    return. So a makespan is that of a whole step with one micro-batch.
    """

    problem: Problem
    sizes: tuple[int, ...]
    recompute: Recompute = "none"

    @cached_property
    def costs(self) -> GraphCosts:
        """The bytes of layers, and their edges.

        Raises:
            InputError: when no size was measured.
        """
        return graph_costs(self.problem, self.sizes)

    @cached_property
    def _times(self) -> ProblemLayerTimes:
        return ProblemLayerTimes(self.problem)

    def graph(self, size: int, in_flight: int) -> OperatorGraph:
        """Return the operators for micro-batches of `size` samples, `in_flight` of them under way."""
        costs, graph = self.costs, self.problem.job.graph
        passes = costs.passes[size, self.recompute]
        producers = sorted({producer for producer, _ in costs.edges})
        tensor_of = {producer: number for number, producer in enumerate(producers)}
        reads = sorted((tensor_of[producer], consumer) for producer, consumer in costs.edges)
        groups = np.arange(costs.layers, dtype=np.int64)
        for one in graph.tied:
            groups[np.isin(groups, groups[list(one.layers)])] = groups[one.layers[0]]
        return OperatorGraph(
            names=[layer.name for layer in graph.layers],
            ticks=self._ticks(size),
            permanent_bytes=_whole(costs.state_bytes + in_flight * passes.kept_bytes),
            temporary_bytes=_whole(passes.taken_bytes),
            producer=np.array(producers, dtype=np.int64),
            tensor_bytes=_whole(passes.sent_bytes[producers]),
            reads=np.array(reads, dtype=np.int64).reshape(-1, 2),
            groups=groups,
        )

    def _ticks(self, size: int) -> Ints:
        """Return the ticks of both passes of each layer on each device, shape (layers, devices)."""
        cluster = self.problem.job.cluster
        columns = {
            pace: self._times.of_group(pace[0], size, 1).both_s / pace[1]
            for pace in {self._pace(rank) for rank in range(cluster.ranks)}
        }
        seconds = np.stack([columns[self._pace(rank)] for rank in range(cluster.ranks)], axis=1)
        return np.maximum(1, _whole(seconds * TICKS_PER_S))

    def _pace(self, rank: int) -> tuple[int, float]:
        cluster = self.problem.job.cluster
        return cluster.group_index_of(rank), cluster.speed_of(rank)

    def devices(self, communication: Communication = "links") -> Devices:
        """Return the devices of the cluster; messages between two of them follow each other."""
        network, ranks = self.problem.cost_model.network, self.problem.job.cluster.ranks
        latency, per_byte = (np.zeros((ranks, ranks)) for _ in range(2))
        for here in range(ranks):
            for there in range(ranks):
                if here != there:
                    empty_s = sum(network.message_s(here, there, 0))
                    full_s = sum(network.message_s(here, there, _PROBE_BYTES))
                    # The gradient takes the same way back.
                    latency[here, there] = 2.0 * empty_s * TICKS_PER_S
                    per_byte[here, there] = 2.0 * (full_s - empty_s) / _PROBE_BYTES * TICKS_PER_S
        return Devices(
            memory_bytes=network.places.room_bytes,
            latency_ticks=latency,
            ticks_per_byte=per_byte,
            communication=communication,
        )


def _whole(values: Floats) -> Ints:
    found: Ints = np.ceil(values).astype(np.int64)
    return found
