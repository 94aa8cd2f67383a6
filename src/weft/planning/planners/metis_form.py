"""The `metis-form` planner: the closed form of Metis, with stages and replicas that know their devices.

    (micro-batches - 1) x longest stage + sum of stages + sum of sends + longest all-reduce of a stage

(Um et al., Metis, USENIX ATC 2024). Groups of nodes are tried in every order. Layers are balanced by the
capacity of each stage's devices, and replicas on unlike devices share the batch by their speed. All stages
have the same degrees here; Metis also gives them unequal numbers of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, islice, permutations
from typing import ClassVar, NamedTuple

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.layout import Layout, rank_order_of
from weft.errors import InputError
from weft.moves.layout import refuse, shares_of
from weft.moves.pipeline_partition import pipeline_partition
from weft.planning.planners.amp.inputs import AmpInputs
from weft.planning.planners.amp.planner import profiled, reduction_s
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.planners.simulated import empty_stage, estimated, rank_by_estimate
from weft.planning.planners.space import degree_layouts, require_closed_form, with_layers
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints


class MetisForm(NamedTuple):
    """Layers of each stage, micro-batches of each replica, and seconds without the gradients' all-reduce."""

    layers_per_stage: tuple[int, ...]
    micro_batches: tuple[int, ...]
    pipeline_s: float


@dataclass(frozen=True, slots=True)
class MetisFormPlanner:
    """The search by the closed form. At least `finalists` fitting layouts are simulated. Up to `orders`
    orders of the groups of nodes are tried."""

    name: ClassVar[str] = "metis-form"
    finalists: int = 8
    orders: int = 24

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Yield every layout of `degree_layouts` with the groups of nodes in every order."""
        for layout in degree_layouts(problem):
            if layout.pp == 1 or layout.ranks < problem.job.cluster.ranks:
                # One stage is everywhere, and the ranks of a plan are those of the first devices.
                yield layout
                continue
            for order in islice(permutations(range(len(problem.job.cluster.groups))), self.orders):
                devices = devices_in_turn(problem.job.cluster, order)
                yield replace(layout, rank_order=rank_order_of(devices.tolist()))

    def search(self, problem: Problem) -> Ranking:
        """Give every layout its stages and shares, and simulate the layouts with the lowest estimates.

        Raises:
            InputError: for pins that the closed form does not know.
        """
        require_closed_form(problem, self.name)
        tables, times = cache(partial(profiled, problem)), ProblemLayerTimes(problem)
        judged = []
        for layout in self.space(problem):
            reason = refuse(problem.job, layout)
            inputs = tables(layout.tp) if reason is None else str(reason)
            if isinstance(inputs, str):
                judged.append(Candidate(layout=layout, verdict=Verdict.REFUSED, reason=inputs))
            else:
                judged.append(_estimated(problem, layout, inputs, times))
        return rank_by_estimate(problem, judged, Bounds(problem), self.finalists)


def devices_in_turn(cluster: Cluster, order: Sequence[int]) -> Ints:
    """Return the devices of all groups of nodes in this order, shape (ranks,)."""
    firsts = list(accumulate((group.count * group.devices for group in cluster.groups), initial=0))
    return np.concatenate([np.arange(firsts[group], firsts[group + 1]) for group in order])


class _Tables(NamedTuple):
    """The numbers of a layout's devices. `work_s` is seconds of a micro-batch in each layer, (stages,
    replicas, layers); `cut_s` of the cut behind each layer, (stages - 1, layers). `grid` is the node of each
    (stage, replica, lane)."""

    work_s: Floats
    cut_s: Floats
    grid: Ints


def _tables(problem: Problem, layout: Layout, inputs: AmpInputs, times: ProblemLayerTimes) -> _Tables:
    """Return the tables of a layout. Raise InputError where no profile has its micro-batch size."""
    order = np.arange(layout.ranks) if layout.rank_order is None else np.array(layout.rank_order)
    ranks = order.reshape(layout.pp, layout.dp, layout.width)
    work_s = _work_s(problem.job.cluster, layout, ranks, times)
    grid = inputs.node_of_rank[ranks]
    per_byte_s = (1.0 / inputs.bandwidth[grid[:-1], grid[1:]]).max(axis=(1, 2))
    sent = layout.micro_batch_size * np.array(inputs.sent_bytes[layout.tp])
    return _Tables(work_s, np.outer(per_byte_s, sent), grid)


def _estimated(problem: Problem, layout: Layout, inputs: AmpInputs, times: ProblemLayerTimes) -> Candidate:
    try:
        work_s, cut_s, grid = _tables(problem, layout, inputs, times)
    except InputError as error:
        # A profile without this micro-batch size refuses to guess.
        return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=str(error.violations[0]))
    if layout.pp > np.count_nonzero(work_s[0, 0]):
        return empty_stage(layout)
    found = metis_form(work_s, cut_s, sum(shares_of(problem.job, layout)))
    estimate_s = found.pipeline_s + reduction_s(inputs, grid, found.layers_per_stage)
    uneven = found.micro_batches if len(set(found.micro_batches)) > 1 else None
    shared = replace(layout, micro_batches_per_replica=uneven)
    return estimated(with_layers(shared, found.layers_per_stage), estimate_s)


def metis_form_s(problem: Problem, layout: Layout) -> float:
    """Return the closed form's seconds of a step of a layout with given layers per stage.

    Raises:
        InputError: when the profile does not cover the layout.
    """
    inputs = profiled(problem, layout.tp)
    if isinstance(inputs, str):
        raise InputError(inputs)
    counts = layout.layers_per_stage or (len(problem.job.graph.layers),)
    assert len(counts) == layout.pp, "several stages say how many layers each has"
    work_s, cut_s, grid = _tables(problem, layout, inputs, ProblemLayerTimes(problem))
    shares = shares_of(problem.job, layout)
    return _pipeline_s(_stage_s(work_s, counts), cut_s, counts, shares) + reduction_s(inputs, grid, counts)


def metis_form(work_s: Floats, cut_s: Floats, micro_batches: int) -> MetisForm:
    """Return stages by capacity and shares by speed, with the closed form of the slowest replica.

    Args:
        work_s: seconds of a micro-batch in each layer on the devices of each stage of each replica, shape
            (stages, replicas, layers).
        cut_s: seconds of the cut behind each layer between two stages, shape (stages - 1, layers).
        micro_batches: the micro-batches of all replicas together.
    """
    replicas = work_s.shape[1]
    # The replicas together are as fast as the sum of their speeds.
    together_s = replicas / np.sum(1.0 / np.maximum(work_s, np.finfo(float).tiny), axis=1)
    counts = pipeline_partition(together_s, cut_s, max(1, micro_batches // replicas)).layers_per_stage
    stage_s = _stage_s(work_s, counts)
    shares = shared_by_speed(1.0 / stage_s.max(axis=0), micro_batches)
    return MetisForm(counts, shares, _pipeline_s(stage_s, cut_s, counts, shares))


def _stage_s(work_s: Floats, counts: Sequence[int]) -> Floats:
    """Return the seconds of a micro-batch in each stage of each replica, with `counts` layers per stage."""
    ends: Ints = np.cumsum(np.array(counts))
    by_stage = np.add.reduceat(work_s, ends - np.array(counts), axis=2)
    # The layers of each stage itself.
    return np.diagonal(by_stage, axis1=0, axis2=2).T


def _pipeline_s(stage_s: Floats, cut_s: Floats, counts: Sequence[int], shares: Sequence[int]) -> float:
    filled_s = (np.array(shares) - 1) * stage_s.max(axis=0) + stage_s.sum(axis=0)
    lasts = np.cumsum(np.array(counts))[:-1] - 1
    crossed_s = cut_s[np.arange(len(counts) - 1), lasts].sum()
    return float(filled_s.max() + crossed_s)


def _work_s(cluster: Cluster, layout: Layout, ranks: Ints, times: ProblemLayerTimes) -> Floats:
    """Return the seconds of a micro-batch, forward and backward, in each layer: (stages, replicas,
    layers)."""
    size, degree = layout.micro_batch_size, layout.tp

    @cache
    def seconds(group: int, speed: float) -> Floats:
        return times.of_group(group, size, degree).both_s / speed

    return np.array(
        [
            [
                seconds(cluster.group_index_of(lanes[0]), min(cluster.speed_of(rank) for rank in lanes))
                for lanes in replicas
            ]
            for replicas in ranks.tolist()
        ]
    )


def shared_by_speed(speeds: Floats, micro_batches: int) -> tuple[int, ...]:
    """Return the micro-batches of each replica in proportion to its speed, at least one each.

    Each remaining one goes to the replica that would end first with one more.
    """
    shares = np.maximum(1, np.floor(micro_batches * speeds / speeds.sum()).astype(np.int64))
    while shares.sum() > micro_batches:
        shares[int(np.argmax(np.where(shares > 1, shares / speeds, -np.inf)))] -= 1
    while shares.sum() < micro_batches:
        shares[int(np.argmin((shares + 1) / speeds))] += 1
    return tuple(shares.tolist())
