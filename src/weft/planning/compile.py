"""From a Plan to its Program: a pure function of the plan and the model's layer graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd, lcm

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.predict.cost.memory import reduced_element_bytes, reduced_parameters
from weft.predict.cost.places import ClusterPlaces
from weft.program.assemble import LoweredLayout, assemble, assemble_part
from weft.program.build import build_evaluation_program, lowered_evaluation, lowered_training
from weft.program.fold import fold_lanes
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.passes import options_of
from weft.program.program import Program
from weft.program.rank_program import RankProgram
from weft.program.schedules import get_schedule
from weft.program.schedules.base import paths_of

Edge = tuple[int, int]


def compile_plan(
    plan: Plan, graph: LayerGraph, *, only_replica: int | None = None, micro_batches: int | None = None
) -> Program:
    """Return the training program of a plan.

    `only_replica` keeps the instructions of one pipeline, that of this path; planners use it, because equal
    pipelines take equal times. `micro_batches` replaces the plan's micro-batches per path and step.

    Raises:
        InputError: when the plan's replicas do not form equal pipelines, or its schedule refuses them.
    """
    layout = pipeline_layout(plan, graph)
    if micro_batches is not None:
        layout = layout.of_length(micro_batches)
    return assemble(_lowered(plan, graph, layout), only_replica)


def compile_part(plan: Plan, graph: LayerGraph, rank: int) -> RankProgram:
    """Return one rank's part of the training program of a plan, without the rest.

    Raises:
        InputError: see `compile_plan`; also when the plan has no such rank.
    """
    return assemble_part(_lowered(plan, graph, pipeline_layout(plan, graph)), rank)


def _lowered(plan: Plan, graph: LayerGraph, layout: PipelineLayout) -> LoweredLayout:
    schedule = get_schedule(plan.schedule.name)
    return lowered_training(layout, schedule, plan.schedule.options, options_of(plan, graph))


def compile_folded(
    plan: Plan, graph: LayerGraph, cluster: Cluster, layout: PipelineLayout | None = None
) -> Program:
    """Return the training program with one pipeline for all equal ones, and one lane where lanes are equal.

    All pipelines stay beside servers, and where shares of the batch, steps of a cycle or ranks are unequal.
    They also stay where none is slowest in all of its stages. Lanes are equal when each replica's ranks are
    equally fast devices of one node, and all stages have equally many. Then they do the same at the same time
    over the same links. Prices are those of the slowest. `layout` is the plan's, perhaps in another length.

    Raises:
        InputError: see `compile_plan`.
    """
    layout = pipeline_layout(plan, graph) if layout is None else layout
    layout.require_valid()
    places, ranks = ClusterPlaces(cluster), layout.rank_tables
    lowered = _lowered(plan, graph, layout)
    alike = len(set(layout.micro_batches)) == len(set(lowered.taken)) == 1
    foldable = (
        alike and not (layout.servers or layout.mixes_replicas) and _one_is_slowest(plan, places, layout)
    )
    program = assemble(lowered, 0 if foldable else None)
    equal = not layout.mixes_lanes and all(
        (column[held] == column[held[:, :1]]).all() for column in (places.node, places.pace) for held in ranks
    )
    return fold_lanes(program) if equal else program


def _one_is_slowest(plan: Plan, places: ClusterPlaces, layout: PipelineLayout) -> bool:
    """Return True if the devices of some pipeline are the slowest in each of its stages."""
    if len(places.paces) == 1:
        return True
    peaks = [group.device.flops_per_s.get(plan.precision, 0.0) for group in places.cluster.groups]
    paces = np.array(peaks)[places.group] * places.speed
    slowest = np.ones(layout.pipelines, dtype=np.bool_)
    for ranks in layout.rank_tables:
        own = paces[ranks].min(axis=1).reshape(layout.pipelines, -1)
        slowest &= (own == own.min()).all(axis=1)
    return bool(slowest.any())


def compile_evaluation(plan: Plan, graph: LayerGraph) -> Program:
    """Return the forward-only program of a plan, for held-out losses."""
    return build_evaluation_program(pipeline_layout(plan, graph), methods=options_of(plan, graph))


def compile_evaluation_part(plan: Plan, graph: LayerGraph, rank: int) -> RankProgram:
    """Return one rank's part of the forward-only program, without the rest.

    Raises:
        InputError: when the plan has no such rank.
    """
    return assemble_part(lowered_evaluation(pipeline_layout(plan, graph), options_of(plan, graph)), rank)


def pipeline_layout(plan: Plan, graph: LayerGraph) -> PipelineLayout:
    """Return the places of stages and their messages to each other, in bytes.

    Raises:
        InputError: when the stages' replicas have shares of the batch that form no pipelines.
    """
    paths, micro_batches = _paths(plan)
    gradient_bytes = reduced_element_bytes(plan)
    held = [reduced_parameters(plan, graph, stage) for stage in range(len(plan.stages))]
    crossing = graph.crossing(stage.layers for stage in plan.stages)
    return PipelineLayout(
        stages=tuple(
            StageLayout(
                replicas=tuple(copy.ranks for copy in stage.replicas),
                gradient_bytes=gradient_bytes * parameters,
                weight_bytes=plan.element_bytes * parameters,
                splits=stage.splits,
            )
            for stage, parameters in zip(plan.stages, held, strict=True)
        ),
        micro_batches=micro_batches,
        message_bytes=_message_bytes(plan, graph, crossing, 1),
        returned_bytes=_message_bytes(plan, graph, crossing, 0),
        own_bytes=()
        if plan.has_like_replicas
        else tuple(
            (_message_bytes(plan, graph, crossing, 1, copy), _message_bytes(plan, graph, crossing, 0, copy))
            for copy in range(len(plan.stages[0].replicas))
        ),
        paths=paths,
        sources=tuple(
            index
            for index, stage in enumerate(plan.stages)
            if any(graph.inputs_read[layer] for layer in stage.layers)
        ),
        servers=len(plan.servers),
    )


def _paths(plan: Plan) -> tuple[int, tuple[int, ...]]:
    """Return the paths through each pipeline of a plan, and the micro-batches of each path.

    Stages with unlike numbers of replicas form as many pipelines as divide all numbers.
    """
    shares = [tuple(copy.micro_batches for copy in stage.replicas) for stage in plan.stages]
    counts = plan.replicas
    if len(set(counts)) == 1:
        if len(set(shares)) != 1:
            raise InputError(Violation("plan", "the stages' replicas differ in their shares of the batch"))
        return paths_of(get_schedule(plan.schedule.name)), shares[0]
    pipelines = gcd(*counts)
    paths = lcm(*counts) // pipelines
    sums = {tuple(map(sum, _in_parts(share, pipelines))) for share in shares}
    if len(sums) != 1 or any(len(set(part)) > 1 for share in shares for part in _in_parts(share, pipelines)):
        problem = "replicas have unequal shares of the batch, where stages have unlike numbers of replicas"
        raise InputError(Violation("plan", problem, "equal shares"))
    return paths, tuple(total // paths for total in sums.pop() for _ in range(paths))


def _in_parts(share: Sequence[int], parts: int) -> list[Sequence[int]]:
    size = len(share) // parts
    return [share[first : first + size] for first in range(0, len(share), size)]


def _message_bytes(
    plan: Plan, graph: LayerGraph, crossing: Mapping[Edge, Collection[int]], end: int, copy: int = 0
) -> dict[Edge, int]:
    """Return the bytes of a message on every stage edge: each tensor that crosses it, once.

    It has the samples of a micro-batch of the stage that splits more. It has the tokens that its receiver
    holds, a replica of the stage at this end of the edge.
    """
    shapes = [plan.shape(stage, copy) for stage in range(len(plan.stages))]

    def size(edge: Edge, layers: Collection[int]) -> int:
        samples = min(map(plan.size_of, edge)) // plan.ep
        shape = shapes[edge[end]]
        if samples != shape.micro_batch_size:
            shape = replace(shape, micro_batch_size=samples)
        sent = graph.amounts("sent", shape)
        return round(plan.element_bytes * sum(sent[layer] for layer in layers))

    return {edge: size(edge, layers) for edge, layers in crossing.items()}
