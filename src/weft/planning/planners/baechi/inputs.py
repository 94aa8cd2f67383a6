"""From a problem to the operators and devices of its placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from weft.describe.plan import Recompute
from weft.moves.layout import rank_table
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.planners.graph_costs import PROBE_BYTES, GraphCosts, graph_costs
from weft.planning.planners.graphpipe.questions import sizes_of
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints

TICKS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class PlacementInputs:
    """The layers of a problem as operators, for micro-batches of any size.

    A device of a placement stands for `dp` replicas of a stage, each on `tp` neighbouring ranks. It is as
    fast as the slowest of these. An operator takes the time of both passes, and its part of the optimizer's
    update. A tensor takes that of its message and of the gradient in return. So a makespan is that of a step
    with one micro-batch.
    """

    problem: Problem
    tp: int
    dp: int
    recompute: Recompute = "none"

    @cached_property
    def costs(self) -> GraphCosts:
        """The bytes of layers, and their edges.

        Raises:
            InputError: when no size was measured.
        """
        sizes, sharding = sizes_of(self.problem, self.dp), self.problem.pins.sharding or "zero-0"
        return graph_costs(self.problem, sizes, tp=self.tp, sharding=sharding, dp=self.dp)

    @cached_property
    def places(self) -> Ints:
        """The ranks that each device stands for, shape (devices, dp, tp)."""
        most = self.problem.job.cluster.ranks // (self.tp * self.dp)
        return rank_table((min(most, self.problem.pins.pp or most), self.dp, self.tp))

    @cached_property
    def _times(self) -> ProblemLayerTimes:
        return ProblemLayerTimes(self.problem)

    def graph(self, size: int, in_flight: int) -> OperatorGraph:
        """Return the operators for micro-batches of `size` samples, `in_flight` of them under way."""
        costs, graph = self.costs, self.problem.job.graph
        passes = costs.passes[size, self.recompute]
        resident = costs.state_bytes + costs.buffer_bytes * (self.dp > 1)
        producers = sorted({producer for producer, _ in costs.edges})
        tensor_of = {producer: number for number, producer in enumerate(producers)}
        reads = sorted((tensor_of[producer], consumer) for producer, consumer in costs.edges)
        groups = np.arange(costs.layers, dtype=np.int64)
        for one in graph.tied:
            groups[np.isin(groups, groups[list(one.layers)])] = groups[one.layers[0]]
        return OperatorGraph(
            names=[layer.name for layer in graph.layers],
            ticks=self._ticks(size),
            permanent_bytes=_whole(resident + in_flight * passes.kept_bytes),
            temporary_bytes=_whole(passes.taken_bytes),
            producer=np.array(producers, dtype=np.int64),
            tensor_bytes=_whole(passes.sent_bytes[producers]),
            reads=np.array(reads, dtype=np.int64).reshape(-1, 2),
            groups=groups,
        )

    def _ticks(self, size: int) -> Ints:
        """Return the ticks of each layer on each device, shape (layers, devices).

        They are those of both passes, and of the micro-batch's part of the optimizer's update.
        """
        cluster, count = self.problem.job.cluster, self.problem.job.global_batch // (self.dp * size)
        paces = [
            {(cluster.group_index_of(rank), cluster.speed_of(rank)) for rank in ranks.ravel().tolist()}
            for ranks in self.places
        ]
        seconds = {
            (group, speed): (
                self._times.of_group(group, size, self.tp).both_s
                + self._times.updates_s(group, self.tp) / count
            )
            / speed
            for group, speed in {pace for each in paces for pace in each}
        }
        slowest = [np.max([seconds[pace] for pace in sorted(each)], axis=0) for each in paces]
        return np.maximum(1, _whole(np.stack(slowest, axis=1) * TICKS_PER_S))

    @cached_property
    def devices(self) -> Devices:
        """The devices; messages between two of them follow each other."""
        network, first = self.problem.cost_model.network, self.places[:, 0, 0].tolist()
        latency, per_byte = (np.zeros((len(first), len(first))) for _ in range(2))
        for (here, rank), (there, peer) in permutations(enumerate(first), 2):
            empty_s, full_s = (sum(network.message_s(rank, peer, size)) for size in (0, PROBE_BYTES))
            # The gradient takes the same way back.
            latency[here, there] = 2.0 * empty_s * TICKS_PER_S
            per_byte[here, there] = 2.0 * (full_s - empty_s) / PROBE_BYTES * TICKS_PER_S
        return Devices(
            memory_bytes=network.places.room_bytes[self.places].min(axis=(1, 2)),
            latency_ticks=latency,
            ticks_per_byte=per_byte,
            communication="links",
        )


@dataclass(frozen=True)
class PlacementQuestion:
    """One placement to look for: samples of a micro-batch, and how many are under way at once."""

    inputs: PlacementInputs
    size: int
    in_flight: int

    @cached_property
    def graph(self) -> OperatorGraph:
        """The operators to place."""
        return self.inputs.graph(self.size, self.in_flight)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a replica in a step."""
        return self.inputs.problem.job.global_batch // (self.inputs.dp * self.size)


def questions(inputs: PlacementInputs) -> Iterator[PlacementQuestion]:
    """Yield questions for every size of micro-batches, with few and with many of them under way."""
    devices = len(inputs.places)
    for size in inputs.costs.sizes:
        count = PlacementQuestion(inputs, size, 1).micro_batches
        for in_flight in sorted({min(count, one) for one in (1, devices, 2 * devices)}):
            yield PlacementQuestion(inputs, size, in_flight)


def _whole(values: Floats) -> Ints:
    found: Ints = np.ceil(values).astype(np.int64)
    return found
