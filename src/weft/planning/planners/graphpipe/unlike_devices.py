"""Stages on unlike devices: most work on the fastest ones, and layers that move until stages take alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.describe.plan import Plan, Stage
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem
from weft.program.arrays import Floats, Ints
from weft.program.program import NONE

# The norm of stages' seconds that moves reduce. A large one is close to the slowest stage; a finite one
# also moves layers from the second slowest to the third, and so makes room.
_NORM = 8
_LEAST_CHANGE = 1e-12


def by_work(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with the stages of most work on the fastest devices, if all have as many ranks.

    Raises:
        InputError: when a profile was not measured at this tensor degree.
    """
    stages = plan.stages
    if len({tuple(len(copy.ranks) for copy in stage.replicas) for stage in stages}) > 1:
        return plan
    by_group = _layer_seconds(problem, plan)
    slowest = [float(_on(problem, by_group, stage).sum()) for stage in stages]
    work_s = [float(by_group[0][list(stage.layers)].sum()) for stage in stages]
    most = sorted(range(len(stages)), key=lambda index: -work_s[index])
    fastest = sorted(range(len(stages)), key=slowest.__getitem__)
    replicas = {index: stages[place].replicas for index, place in zip(most, fastest, strict=True)}
    dealt = [stage.model_copy(update={"replicas": replicas[index]}) for index, stage in enumerate(stages)]
    return plan.model_copy(update={"stages": tuple(dealt)})


def levelled(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with layers moved between neighbouring stages while that levels their seconds.

    A layer moves to the last stage that it reads, or to the first one that reads it. So all edges still lead
    to later stages. No stage becomes empty. Devices differ, so the seconds of a layer depend on its stage.

    Raises:
        InputError: when a profile was not measured at this tensor degree.
    """
    graph, by_group = problem.job.graph, _layer_seconds(problem, plan)
    seconds = np.array([_on(problem, by_group, stage) for stage in plan.stages])
    stage_of = np.zeros(len(graph.layers), dtype=np.int64)
    for index, stage in enumerate(plan.stages):
        stage_of[list(stage.layers)] = index
    # Replicas share the batch of a stage.
    seconds /= np.array([[len(stage.replicas)] for stage in plan.stages])
    edges = np.array(graph.edges, dtype=np.int64).reshape(-1, 2)
    while (move := _best_move(seconds, stage_of, edges)) is not None:
        layer, target = move
        stage_of[layer] = target
    moved = [
        stage.model_copy(update={"layers": tuple(np.flatnonzero(stage_of == index).tolist())})
        for index, stage in enumerate(plan.stages)
    ]
    return plan.model_copy(update={"stages": tuple(moved)})


def _best_move(seconds: Floats, stage_of: Ints, edges: Ints) -> tuple[int, int] | None:
    """Return the layer and its new stage that reduce the norm of the stages' seconds most; None: none does.

    `seconds` are those of each layer on each stage, shape (stages, layers).
    """
    taken = np.bincount(stage_of, weights=seconds[stage_of, np.arange(len(stage_of))], minlength=len(seconds))
    layer, target = moves(stage_of, edges, len(seconds))
    source = stage_of[layer]
    scaled, scale = taken / taken.max(), taken.max()
    given, got = seconds[source, layer] / scale, seconds[target, layer] / scale
    change = (scaled[source] - given) ** _NORM + (scaled[target] + got) ** _NORM
    change -= scaled[source] ** _NORM + scaled[target] ** _NORM
    change[np.bincount(stage_of)[source] == 1] = 0.0
    if not len(change) or change.min() > -_LEAST_CHANGE:
        return None
    best = int(change.argmin())
    return int(layer[best]), int(target[best])


def moves(stage_of: Ints, edges: Ints, stages: int) -> tuple[Ints, Ints]:
    """Return layers and new stages: moves along edges that leave all of them leading to later stages."""
    producer, consumer = edges.T
    last, first = np.full(len(stage_of), NONE), np.full(len(stage_of), stages)
    np.maximum.at(last, consumer, stage_of[producer])
    np.minimum.at(first, producer, stage_of[consumer])
    back = np.flatnonzero((last != NONE) & (last < stage_of))
    on = np.flatnonzero((first != stages) & (first > stage_of))
    return np.concatenate([back, on]), np.concatenate([last[back], first[on]])


def _layer_seconds(problem: Problem, plan: Plan) -> list[Floats]:
    """Return by group of nodes the seconds of each layer on its slowest device; each has shape (layers,)."""
    groups, times = problem.job.cluster.groups, ProblemLayerTimes(problem)
    return [
        times.of_group(group, plan.micro_batch_size, plan.tensor_degrees[0]).both_s
        / min(groups[group].speeds or (1.0,))
        for group in range(len(groups))
    ]


def _on(problem: Problem, by_group: Sequence[Floats], stage: Stage) -> Floats:
    """Return the seconds of all layers on the slowest device of a stage, shape (layers,)."""
    group_of = problem.cost_model.network.places.group
    used = {int(group_of[rank]) for copy in stage.replicas for rank in copy.ranks}
    return max((by_group[group] for group in sorted(used)), key=lambda one: float(one.sum()))
