"""From a Plan to its Program: a pure function of the plan and the model's layer graph."""

from __future__ import annotations

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph, TiedParameters
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.predict.cost.memory import gradient_element_bytes, own_parameters
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.fold import fold_lanes
from weft.program.layout import PipelineLayout, StageLayout, TiedWeights
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import paths_of


def compile_plan(plan: Plan, graph: LayerGraph, *, only_replica: int | None = None) -> Program:
    """The training program of a plan.

    `only_replica` keeps the instructions of one pipeline replica; planners use it, because equal replicas
    take equal times.

    Raises:
        InputError: when the plan's replicas do not form equal pipelines, or its schedule refuses them.
    """
    layout = pipeline_layout(plan, graph)
    schedule = get_schedule(plan.schedule.name)
    return build_training_program(
        layout,
        schedule,
        plan.schedule.options,
        sharding=plan.sharding,
        blocking=plan.blocking,
        gradient_norm=plan.gradient_norm,
        only_replica=only_replica,
    )


def compile_folded(plan: Plan, graph: LayerGraph, cluster: Cluster) -> Program:
    """The training program with one pipeline in place of all that run as many micro-batches, and one lane
    where lanes are equal.

    Pipelines are all kept where shares of the batch are unequal, or where none is slowest in all of its
    stages. Lanes are equal when each replica's ranks are equally fast devices of one node, for then they do
    the same at the same time over the same links. Prices are those of the slowest.

    Raises:
        InputError: as `compile_plan` does.
    """
    shares = {copy.micro_batches for stage in plan.stages for copy in stage.replicas}
    foldable = len(shares) == 1 and _one_is_slowest(plan, cluster)
    program = compile_plan(plan, graph, only_replica=0 if foldable else None)
    places = (copy.ranks for stage in plan.stages for copy in stage.replicas)
    equal = all(
        len({(cluster.node_of(rank), cluster.speed_of(rank)) for rank in ranks}) == 1 for ranks in set(places)
    )
    return fold_lanes(program) if equal else program


def _one_is_slowest(plan: Plan, cluster: Cluster) -> bool:
    """Whether some pipeline has, in each of its stages, devices as slow as those of any other pipeline."""
    if len(cluster.groups) == 1 and not cluster.groups[0].speeds:
        return True
    pace = [
        group.device.flops_per_s.get(plan.precision, 0.0) * speed
        for group in cluster.groups
        for _ in range(group.count)
        for speed in group.speeds or (1.0,) * group.devices
    ]
    paces = np.array(
        [[min(pace[rank] for rank in copy.ranks) for copy in stage.replicas] for stage in plan.stages]
    )
    slowest = paces == paces.min(axis=1, keepdims=True)
    paths = paths_of(get_schedule(plan.schedule.name))
    return bool(slowest.reshape(len(paces), -1, paths).all(axis=(0, 2)).any())


def compile_evaluation(plan: Plan, graph: LayerGraph) -> Program:
    """The forward-only program of a plan, for held-out losses."""
    return build_evaluation_program(pipeline_layout(plan, graph), sharding=plan.sharding)


def pipeline_layout(plan: Plan, graph: LayerGraph) -> PipelineLayout:
    """Where stages run and what they send each other, in bytes.

    Raises:
        InputError: when the stages' replicas have different numbers or shares.
    """
    shares = [tuple(copy.micro_batches for copy in stage.replicas) for stage in plan.stages]
    if len(set(shares)) != 1:
        raise InputError(Violation("plan", "the stages' replicas differ in number or share of the batch"))
    gradient_bytes = gradient_element_bytes(plan)
    tied = _tied_weights(plan, graph)
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(copy.ranks for copy in stage.replicas),
                gradient_bytes=gradient_bytes * own_parameters(graph, stage.layers, plan.shape(index)),
                weight_bytes=plan.element_bytes * own_parameters(graph, stage.layers, plan.shape(index)),
            )
            for index, stage in enumerate(plan.stages)
        ),
        micro_batches=shares[0],
        message_bytes=_message_bytes(plan, graph),
        paths=paths_of(get_schedule(plan.schedule.name)),
        tied=tuple(
            TiedWeights(stages, gradient_bytes * round(one.parameters(plan.shape(stages[0]))))
            for stages, one in tied
        ),
        island=plan.island,
        context_parallel=plan.context_parallel,
    )


def _tied_weights(plan: Plan, graph: LayerGraph) -> list[tuple[tuple[int, ...], TiedParameters]]:
    """The parameters that layers of several stages use, with these stages."""
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    users = [(tuple(sorted({stage_of[layer] for layer in one.layers})), one) for one in graph.tied]
    return [(stages, one) for stages, one in users if len(stages) > 1]


def _message_bytes(plan: Plan, graph: LayerGraph) -> dict[tuple[int, int], int]:
    """Bytes per micro-batch on every stage edge: what the producer's layers send across it, each once."""
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    senders: dict[tuple[int, int], set[int]] = {}
    for producer, consumer in graph.edges:
        edge = (stage_of[producer], stage_of[consumer])
        if edge[0] != edge[1]:
            senders.setdefault(edge, set()).add(producer)
    return {
        edge: round(
            plan.element_bytes * sum(graph.layers[layer].sent(plan.shape(edge[0])) for layer in layers)
        )
        for edge, layers in senders.items()
    }
