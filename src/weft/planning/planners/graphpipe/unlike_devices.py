"""Stages on unlike devices: most work on the fastest ones, and layers that move until stages take alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, Stage
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem
from weft.program.arrays import Floats

# The norm of stages' seconds that moves reduce. A large one is close to the slowest stage; a finite one
# also moves layers from the second slowest to the third, and so makes room.
_NORM = 8


class _Move(NamedTuple):
    layer: int
    source: int
    target: int


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
    neighbours = _neighbours(graph)
    while (move := _best_move(seconds, stage_of, neighbours)) is not None:
        stage_of[move.layer] = move.target
    moved = [
        stage.model_copy(update={"layers": tuple(np.flatnonzero(stage_of == index).tolist())})
        for index, stage in enumerate(plan.stages)
    ]
    return plan.model_copy(update={"stages": tuple(moved)})


def _best_move(
    seconds: Floats, stage_of: np.ndarray, neighbours: Sequence[tuple[list[int], list[int]]]
) -> _Move | None:
    """Return the move that reduces the norm of the stages' seconds most; None if none does."""
    layers = np.arange(len(stage_of))
    taken = np.bincount(stage_of, weights=seconds[stage_of, layers], minlength=len(seconds))
    counts = np.bincount(stage_of, minlength=len(seconds))
    scale = float(taken.max())
    best, least = None, -1e-12
    for move in _moves(stage_of, neighbours):
        if counts[move.source] == 1:
            continue
        former, other = float(taken[move.source]) / scale, float(taken[move.target]) / scale
        given = float(seconds[move.source, move.layer]) / scale
        got = float(seconds[move.target, move.layer]) / scale
        change = (former - given) ** _NORM + (other + got) ** _NORM - former**_NORM - other**_NORM
        if change < least:
            best, least = move, change
    return best


def _moves(stage_of: np.ndarray, neighbours: Sequence[tuple[list[int], list[int]]]) -> Iterator[_Move]:
    """Yield the moves of layers along edges that leave all edges leading to the same or later stages."""
    of = stage_of.tolist()
    for layer, (read, readers) in enumerate(neighbours):
        source = of[layer]
        if read and (last := max(of[one] for one in read)) < source:
            yield _Move(layer, source, last)
        if readers and (first := min(of[one] for one in readers)) > source:
            yield _Move(layer, source, first)


def _neighbours(graph: LayerGraph) -> list[tuple[list[int], list[int]]]:
    """Return, for each layer, the layers that it reads and those that read it."""
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in graph.layers]
    for producer, consumer in graph.edges:
        found[consumer][0].append(producer)
        found[producer][1].append(consumer)
    return found


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
