"""Weights averaged over replicas that step by themselves (local SGD; Stich, arXiv 1805.09767).

Replicas exchange nothing in all steps but every K-th. After the K-th step of each cycle they average
their weights, before their first read in the next cycle. Averagings stand at the end of a device's cycle, in
the order of these first reads. The pass serves every method whose options are `LocalSteps`. Such methods
differ in their outer step from the average to the next weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan
from weft.describe.synchronisation import DECIDED, local_steps
from weft.errors import Violation
from weft.methods.local_averaging.kinds import AVERAGE_WEIGHTS, AveragesWeights
from weft.methods.local_averaging.options import NAME
from weft.methods.local_averaging.verify import check_averagings
from weft.predict.cost.memory import gradient_element_bytes, stage_parameters
from weft.program.kinds import READS_WEIGHTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, PredictStep, replica_groups
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges

NOBODY = "one replica has nobody to average with"
# Methods whose numbers are of all replicas in every step.
_EVERY_STEP = ("auxiliary-head", "micro-batch-norms")


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    """The options of a cycle.

    Attributes:
        every: steps between averagings.
        weight_bytes: by stage, of the stepped weights on one rank.
        steps, taken: by replica, the number of these steps that it takes, and their numbers.
    """

    every: int
    weight_bytes: tuple[int, ...]
    steps: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]


def options(plan: Plan, graph: LayerGraph) -> AveragingOptions | None:
    steps = local_steps(plan.sync, "plan: sync.options")
    if steps is None:
        return None
    # Weights are averaged in the precision of their step, which is the precision of their gradients.
    element = gradient_element_bytes(plan)
    held = (
        stage_parameters(graph, stage.layers, plan.shape(index)) for index, stage in enumerate(plan.stages)
    )
    replicas = len(plan.stages[0].replicas)
    return AveragingOptions(
        every=steps.every,
        weight_bytes=tuple(element * parameters for parameters in held),
        steps=steps.steps_of(replicas),
        taken=steps.taken(replicas),
    )


def refuse(layout: PipelineLayout, averaging: AveragingOptions, others: Mapping[str, Any]) -> list[Violation]:
    if layout.replicas == 1:
        return [Violation("sync", NOBODY, "dense")]
    if len(averaging.steps) != layout.replicas:
        problem = f"{len(averaging.steps)} numbers for {layout.replicas} replicas"
        return [Violation("sync.replica_steps", problem, DECIDED)]
    if set(averaging.steps) == {averaging.every}:
        return []
    return no_rest(layout, others, "sync.replica_steps", str(averaging.every))


def no_rest(layout: PipelineLayout, others: Mapping[str, Any], key: str, nearest: str) -> list[Violation]:
    """Return the reasons why no replica can rest in a step; `key` asks for it, `nearest` does not."""
    together = [name for name in _EVERY_STEP if name in others]
    if layout.paths > 1:
        together.append("two paths on the same ranks")
    return [Violation(key, f"no replica rests in a step with {one}", nearest) for one in together]


def decide(plan: Plan, graph: LayerGraph, predicted: PredictStep) -> Plan:
    """Return the plan with the steps of replicas, as many as fit into those of the fastest one.

    Heterogeneous local steps are those of Wang et al., arXiv 2007.07481.
    """
    steps = local_steps(plan.sync, "plan: sync.options")
    if steps is None or steps.replica_steps != DECIDED:
        return plan
    program, simulation = predicted(plan)
    timeline = simulation.timeline
    own = timeline.kind != AVERAGE_WEIGHTS
    replica = program.columns.replica[timeline.position[own]]
    ends = np.zeros(len(plan.stages[0].replicas), dtype=np.int64)
    np.maximum.at(ends, replica, timeline.end_ns[own])
    spans = ends - timeline.start_ns[own].min()
    fitting = np.maximum(1, spans.min() * steps.every // spans)
    options = {**plan.sync.options, "replica_steps": " ".join(map(str, fitting.tolist()))}
    return plan.model_copy(update={"sync": Choice(name=plan.sync.name, options=options)})


def average(
    pipeline: LoweredPipeline, layout: PipelineLayout, averaging: AveragingOptions
) -> LoweredPipeline:
    """Add the averagings to one pipeline's cycle: one after every K-th step of each stage.

    Readers of such a step's weights then read the averaged weights.
    """
    columns, edges = pipeline.columns, pipeline.edges
    last = (columns.kind == STEP) & ((columns.iteration + 1) % averaging.every == 0)
    steps = np.flatnonzero(last)
    row_of = np.full(len(columns), -1, dtype=np.int64)
    row_of[steps] = len(columns) + np.arange(len(steps), dtype=np.int64)
    # The rows of a device's step are neighbours.
    place = columns.rank * (int(columns.iteration.max(initial=0)) + 1) + columns.iteration
    anchors = np.searchsorted(place, place[steps], side="right") - 1
    stage = columns.stage[steps]
    added = Columns.of(
        len(steps),
        kind=AVERAGE_WEIGHTS,
        stage=stage,
        replica=columns.replica[steps],
        iteration=columns.iteration[steps],
        rank=columns.rank[steps],
        bytes=np.array(averaging.weight_bytes, dtype=np.int64)[stage],
    )
    follows = last[edges.source] & is_any_of(columns.kind[edges.target], READS_WEIGHTS)
    source = np.where(follows, row_of[edges.source], edges.source)
    moved = LoweredPipeline(columns, Edges(source=source, target=edges.target, distance=edges.distance))
    return insert(moved, added, anchors, 1 + stage, Edges.of(steps, row_of[steps]))


def groups(layout: PipelineLayout, averaging: AveragingOptions) -> tuple[GroupTable, ...]:
    """Return the groups of all replicas of a stage, lane by lane."""
    everybody = [list(range(layout.replicas))]
    return (replica_groups((AVERAGE_WEIGHTS,), layout, [everybody] * len(layout.stages)),)


PASS = Pass(
    name=NAME,
    options=options,
    cycle=lambda averaging: averaging.every,
    taken=lambda averaging: averaging.taken,
    apply_to_cycle=average,
    last=True,
    refuse=refuse,
    groups=groups,
    owes=lambda layout, averaging: AveragesWeights(every=averaging.every, steps=averaging.steps),
    check=check_averagings,
    decide=decide,
)
