"""The single layers of a placement: on which rank, and when in the forward pass of one micro-batch."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from weft.describe.amount import Shape
from weft.planning.planned_job import PlannedJob
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.program.arrays import Floats, Ints
from weft.program.kinds import FORWARD
from weft.web.rows.plan import ranks_of


class PlacedLayers(NamedTuple):
    """The layers of a plan, in the order of the model.

    Attributes:
        lanes: the ranks that compute the first replica of a stage, each with its device.
        kinds: the kinds of layers, those with the most time first.
        names, parameters: of each layer.
        lane, kind, stage: of each layer, its places in `lanes` and `kinds`, and its stage; shape (layers,).
        start_s, end_s: seconds since the first layer starts, shape (layers,).
    """

    lanes: tuple[str, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    parameters: tuple[int, ...]
    lane: Ints
    kind: Ints
    stage: Ints
    start_s: Floats
    end_s: Floats


def placed_layers(planned: PlannedJob) -> PlacedLayers:
    """Return the layers of a plan in its predicted step: the first forward pass of every stage.

    The simulator times whole passes. The layers of a stage follow each other, and divide its pass by their
    own predicted seconds.

    Raises:
        InputError: when a profile was not measured at the plan's tensor degree.
    """
    plan, graph, cluster = planned.plan, planned.problem.job.graph, planned.problem.job.cluster
    start_s, end_s = np.zeros(len(graph.layers)), np.zeros(len(graph.layers))
    lane, stage_of = (np.zeros(len(graph.layers), dtype=np.int64) for _ in range(2))
    leaders = sorted({ranks_of(stage)[0] for stage in plan.stages})
    times = ProblemLayerTimes(planned.problem)
    group_of = planned.problem.cost_model.network.places.group
    for index, stage in enumerate(plan.stages):
        rank, own = ranks_of(stage)[0], list(stage.layers)
        begin, end = _first_pass_s(planned, index, rank)
        passes = times.of_group(int(group_of[rank]), plan.size_of(index), plan.tensor_degrees[index])
        borders = np.concatenate([[0.0], np.cumsum(passes.forward_s[own])])
        borders = begin + (end - begin) * borders / max(borders[-1], 1e-15)
        start_s[own], end_s[own] = borders[:-1], borders[1:]
        lane[own], stage_of[own] = leaders.index(rank), index
    taken: defaultdict[str, float] = defaultdict(float)
    for layer, seconds in zip(graph.layers, (end_s - start_s).tolist(), strict=True):
        taken[layer.kind] += seconds
    kinds = tuple(sorted(taken, key=lambda kind: (-taken[kind], kind)))
    number = {kind: place for place, kind in enumerate(kinds)}
    return PlacedLayers(
        lanes=tuple(f"rank {rank}, {cluster.device_of(rank).name}" for rank in leaders),
        kinds=kinds,
        names=tuple(layer.name for layer in graph.layers),
        parameters=tuple(map(round, graph.amounts("parameters", Shape(1, plan.sequence, 1)))),
        lane=lane,
        kind=np.array([number[layer.kind] for layer in graph.layers], dtype=np.int64),
        stage=stage_of,
        start_s=start_s - start_s.min(),
        end_s=end_s - start_s.min(),
    )


def _first_pass_s(planned: PlannedJob, stage: int, rank: int) -> tuple[float, float]:
    """Return the start and end of a rank's first forward pass of a stage, in seconds."""
    timeline = planned.predicted.simulation.timeline
    rows = np.flatnonzero((timeline.rank == rank) & (timeline.stage == stage) & (timeline.kind == FORWARD))
    first = rows[timeline.start_ns[rows].argmin()]
    return float(timeline.start_ns[first]) / 1e9, float(timeline.end_ns[first]) / 1e9
