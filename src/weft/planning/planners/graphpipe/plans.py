"""From a partition into stages to a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import gcd

from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Plan, Replica, Sharding, Stage
from weft.moves.layout import build_plan
from weft.planning.planners.graphpipe.part_plans import StageGraph, StageOfLayers
from weft.planning.problem import Problem

# Without branches both orders are the same.
SCHEDULE, CHAIN_SCHEDULE = "graph-1f1b", "1f1b"
SPLIT_SCHEDULE, SPLIT_CHAIN_SCHEDULE = "graph-zb-h1", "zb-h1"


def plan_of(
    problem: Problem, found: StageGraph, *, tp: int, sharding: Sharding, in_a_row: bool = False
) -> Plan:
    """Return the Plan of a partition; its stages may have unlike numbers of replicas.

    Stages are in a topological order, by their first layers. With `in_a_row` they keep their order, and run
    as a chain, even if they form a graph. The replicas of a stage are neighbours.

    Raises:
        InputError: when methods of the job do not go with the plan.
    """
    stages, pins = found.stages if in_a_row else in_order(problem.job.graph, found.stages), problem.pins
    edges = edges_of(problem.job.graph, [stage.layers for stage in stages])
    branches = not in_a_row and longest_path(edges, [1.0] * len(stages)) < len(stages)
    alike = len({(stage.replicas, stage.kind) for stage in stages}) == 1
    layout = Layout(
        # The layout of unlike stages has all decisions but the stages.
        pp=len(stages) if alike else 1,
        dp=max(stage.replicas for stage in stages),
        tp=tp,
        loops=1,
        micro_batch_size=found.micro_batch_size,
        schedule=pins.schedule or (SCHEDULE if branches else CHAIN_SCHEDULE),
        sync=problem.sync or DENSE,
        sharding=sharding,
        **pins.besides(DECIDED),
    )
    plan = build_plan(problem.job, layout, [1.0] * len(problem.job.graph.layers))
    if not alike:
        plan = plan.model_copy(update=_dealt(plan, stages, tp))
    own = [
        placed.model_copy(update={"layers": stage.layers, "recompute": stage.recompute})
        for placed, stage in zip(plan.stages, stages, strict=True)
    ]
    return plan.model_copy(update={"stages": tuple(own)})


def _dealt(plan: Plan, stages: Sequence[StageOfLayers], tp: int) -> dict[str, object]:
    """Return a mesh, and equal stages with so many replicas of `tp` neighbouring ranks.

    Earlier kinds of devices have lower ranks. Of one kind, stages with more replicas do. So replicas lie on
    few nodes, if numbers are powers of two.
    """
    replicas = [stage.replicas for stage in stages]
    pipelines, ranks = gcd(*replicas), count()
    placed: dict[int, Stage] = {}
    for index in sorted(range(len(replicas)), key=lambda one: (stages[one].kind, -replicas[one])):
        share = plan.micro_batches // replicas[index]
        copies = (Replica(ranks=(*islice(ranks, tp),), micro_batches=share) for _ in range(replicas[index]))
        placed[index] = Stage(layers=plan.stages[0].layers, replicas=tuple(copies))
    mesh = {**plan.mesh, "pp": sum(replicas) // pipelines, "dp": pipelines}
    return {"stages": tuple(placed[index] for index in range(len(replicas))), "mesh": mesh}


# Decisions of a layout that a partition makes.
DECIDED = {"pp", "dp", "tp", "loops", "micro_batch_size", "schedule", "sharding", "recompute"}


def in_order(graph: LayerGraph, stages: Sequence[StageOfLayers]) -> list[StageOfLayers]:
    """Return stages after all that they read; among those that may come next, by the first layer."""
    edges = edges_of(graph, [stage.layers for stage in stages])
    missing = [sum(consumer == index for _, consumer in edges) for index in range(len(stages))]
    ready = [(stage.layers, index) for index, stage in enumerate(stages) if not missing[index]]
    heapify(ready)
    ordered: list[StageOfLayers] = []
    while ready:
        _, index = heappop(ready)
        ordered.append(stages[index])
        for producer, consumer in edges:
            if producer == index:
                missing[consumer] -= 1
                if not missing[consumer]:
                    heappush(ready, (stages[consumer].layers, consumer))
    return ordered


def depth_of(plan: Plan, graph: LayerGraph) -> int:
    """Return the number of stages on the longest path of a plan's stage graph."""
    edges = edges_of(graph, [stage.layers for stage in plan.stages])
    return round(longest_path(edges, [1.0] * len(plan.stages)))


def longest_path(edges: Sequence[tuple[int, int]], weights: Sequence[float]) -> float:
    """Return the largest sum of the stages' weights along sorted edges, which lead to later stages."""
    before = [0.0] * len(weights)
    for producer, consumer in edges:
        before[consumer] = max(before[consumer], before[producer] + weights[producer])
    return max(map(sum, zip(before, weights, strict=True)))


def edges_of(graph: LayerGraph, stages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the sorted edges of the stage graph of stages with these layers."""
    return sorted(graph.crossing(stages))
