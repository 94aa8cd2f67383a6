"""Estimates of steps on unlike devices, which decide the order of simulation, and their lower bounds.

In the least step of a layout nobody waits except for a pipeline to fill. Device k takes t_k(l) seconds for a
micro-batch in layer l. The best device takes W = sum_l t(l), where t(l) = min_k t_k(l). Device k is worth
v_k = max_l t(l) / t_k(l) of the best. Places with V = sum v_k do M micro-batches in M W / V. Each of R
pipelines with v loops fills and drains while the other devices hold a micro-batch:

    step >= W ((M - R / v) / V + 1 / v)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from weft.describe.layout import Layout
from weft.describe.plan import Sharding
from weft.moves.sharers import sharers_of
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.weft.stages import Dealt
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints
from weft.program.buffers import SHARDED_BUFFERS


def ideal_step_s(layout: Layout, micro_batches: int, times_s: Sequence[Floats], pace_of_rank: Ints) -> float:
    """Return a lower bound, in seconds, of `weft.planning.planners.weft.stages.deal` for any placement.

    Args:
        layout: its degrees and loops count.
        micro_batches: the micro-batches of all replicas together.
        times_s: by pace the seconds of one micro-batch, forward and backward, in each layer.
        pace_of_rank: index into `times_s` of each rank of the cluster.
    """
    rows = np.array(times_s)
    fastest = rows.min(axis=0)
    taken = fastest > 0.0
    if not taken.any():
        return 0.0
    worth = (fastest[taken] / rows[:, taken]).max(axis=1)
    places = worth[pace_of_rank[: layout.ranks]].sum() / layout.width
    filling = 1.0 / layout.loops
    computing = (micro_batches - layout.dp * filling) / places
    return float(fastest.sum() * (computing + filling))


# States that every rank holds, or shards with little to exchange for it.
LIGHT: tuple[Sharding, ...] = ("zero-0", "zero-1")
# Gathers of a stage's weights per reduction of its gradients, where several stages share a buffer.
_GATHERS_PER_REDUCTION = 3


class StepEstimates:
    """Estimates for the layouts of one problem."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self._job, self._bounds = problem.job, bounds
        self._network = problem.cost_model.network

    def step_s(self, layout: Layout, devices: Ints, found: Dealt) -> float:
        """Return the estimated seconds of a step.

        It is the slowest pipeline, or the exchanges of replicas if these take longer. The last reduction and
        one micro-batch's hops through all stages and back are added.

        Args:
            layout: its degrees and choices.
            devices: the device of every rank, shape (stages in line, replicas, ranks of a replica of a
                stage).
            found: its stages and shares.
        """
        reduced_s, all_s = self._exchanged_s(layout, devices, found)
        shape, layers = layout.shape(self._job.sequence), self._job.graph.layers
        sent = round(layers[len(layers) // 2].sent(shape) * self._bounds.element_bytes)
        firsts = devices[:, 0, 0].tolist()
        hops = (self._network.message_s(rank, peer, sent) for rank, peer in pairwise(firsts))
        hops_s = 2.0 * layout.loops * sum(map(sum, hops))
        return max(found.pipeline_s, all_s - reduced_s) + reduced_s + hops_s

    def _exchanged_s(self, layout: Layout, devices: Ints, found: Dealt) -> tuple[float, float]:
        """Return the seconds of one reduction of the largest stage, and of all exchanges of its device."""
        gradients, weights = self._bounds.exchanged_bytes(layout)
        starts = np.cumsum(found.layers_per_stage) - np.array(found.layers_per_stage)
        reduced, gathered = np.add.reduceat(gradients, starts), np.add.reduceat(weights, starts)
        largest = int(np.argmax(reduced))
        ranks = devices[self._bounds.placement(layout)[0][largest], :, 0].tolist()
        if layout.sharding in LIGHT:
            reduced_s = self._network.all_reduce_s(ranks, round(float(reduced[largest])))
            return reduced_s, layout.loops * reduced_s
        # Stages with their own buffers exchange once in a step, others each time that they run.
        own = layout.loops <= SHARDED_BUFFERS
        rounds = 1 if own else -(-max(found.micro_batches) // layout.pp)
        together = ranks[: sharers_of(layout)]
        reduced_s = self._network.reduce_scatter(together, round(float(reduced[largest]))).seconds
        gather_s = self._network.all_gather(together, round(float(gathered[largest]))).seconds
        gathers = 1 if layout.sharding == "zero-2" else rounds * (1 if own else _GATHERS_PER_REDUCTION)
        return reduced_s, layout.loops * (rounds * reduced_s + gathers * gather_s)
