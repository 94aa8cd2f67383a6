"""Sums of the experts' tokens over ranks: one for each step of a stage, or one for each micro-batch.

A sum over the whole step lies between all forward and all backward passes of a stage. Only some orders have
such a place. A sum of one micro-batch of every replica follows its forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.methods.expert_balance.kinds import EXPERT_COUNTS, EXPERT_LOADS, BalancesExperts
from weft.methods.expert_balance.options import BY_INDEX, NAME, options_of
from weft.program.arrays import Ints
from weft.program.codes import distinct_rows
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.insert import after_sends, insert
from weft.program.passes.meeting import add_meeting, meeting_groups
from weft.program.program import NONE, Columns, Edges

# A count is an fp64 number, exact to 2**53 tokens.
COUNT_BYTES = 8
_STARTS = (BACKWARD, BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Balanced:
    """The layers with experts of each stage.

    Attributes:
        layers: their number in each stage.
        experts: experts of a layer.
        counts: True if ranks add up counts in the step; `by_index`: for each micro-batch.
        biases: True if steps change the biases of routers.
    """

    layers: tuple[int, ...]
    experts: int
    counts: bool
    by_index: bool
    biases: bool

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, count in enumerate(self.layers) if count)


def mixtures(graph: LayerGraph) -> tuple[int, ...]:
    """Return the positions of the layers with experts."""
    return tuple(place for place, layer in enumerate(graph.layers) if layer.dispatched.terms)


def options(plan: Plan, graph: LayerGraph) -> Balanced | None:
    table = options_of(plan)
    if table is None:
        return None
    places = set(mixtures(graph))
    layers = tuple(len(places & set(stage.layers)) for stage in plan.stages)
    return Balanced(layers, graph.experts, table.counts, table.balance in BY_INDEX, table.bias_rate > 0)


def refuse(layout: PipelineLayout, balanced: Balanced, others: Mapping[str, Any]) -> list[Violation]:
    problems = []
    if balanced.by_index and len(set(layout.micro_batches)) > 1:
        problem = "replicas with unequal shares of micro-batches cannot count them one by one together"
        problems.append(Violation(NAME, problem, "equal shares"))
    if balanced.by_index and any(layout.stages[stage].splits > 1 for stage in balanced.stages):
        problems.append(Violation(NAME, "stages that split micro-batches count parts of them", "no splits"))
    return problems


def add_sums(pipeline: LoweredPipeline, layout: PipelineLayout, balanced: Balanced) -> LoweredPipeline:
    """Add the sums to one pipeline; steps wait for the loads if they change biases by them."""
    stages = _trained(layout, balanced)
    if balanced.counts and stages:
        pipeline = _with_counts(pipeline, layout, balanced, stages)
    numbers = sum(balanced.layers) * (2 * balanced.experts + 1)
    return add_meeting(pipeline, EXPERT_LOADS, COUNT_BYTES * numbers, steps_wait=balanced.biases)


def _with_counts(
    pipeline: LoweredPipeline, layout: PipelineLayout, balanced: Balanced, stages: tuple[int, ...]
) -> LoweredPipeline:
    columns = pipeline.columns
    here = np.isin(columns.stage, np.array(stages, dtype=np.int64))
    forwards = np.flatnonzero((columns.kind == FORWARD) & here)
    starts = np.flatnonzero(is_any_of(columns.kind, _STARTS) & here)
    both = np.concatenate([forwards, starts])
    part = np.full(len(both), NONE, dtype=np.int64)
    if balanced.by_index:
        # Replicas run micro-batches one after the other of the batch, each as many.
        part = columns.micro_batch[both] % layout.micro_batches[0]
    first, sum_of = distinct_rows(columns.stage[both], columns.replica[both], part)
    last: Ints = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(last, sum_of[: len(forwards)], forwards)
    rows = len(columns) + sum_of
    added = Columns.of(
        len(first),
        kind=EXPERT_COUNTS,
        stage=columns.stage[last],
        replica=columns.replica[last],
        part=part[first],
        rank=columns.rank[last],
        bytes=COUNT_BYTES * balanced.experts * np.array(balanced.layers, dtype=np.int64)[columns.stage[last]],
    )
    edges = [Edges.of(forwards, rows[: len(forwards)]), Edges.of(rows[len(forwards) :], starts)]
    return insert(
        pipeline, added, after_sends(columns, last), np.ones(len(first), dtype=np.int64), Edges.join(edges)
    )


def groups(layout: PipelineLayout, balanced: Balanced) -> Sequence[GroupTable]:
    """Return all ranks of each stage: replicas and token ranks count tokens of their own.

    Tensor ranks count the same tokens several times, which leaves shares of experts as they are.
    """
    loads = meeting_groups(layout, EXPERT_LOADS)
    if not balanced.counts:
        return loads
    numbers: dict[tuple[int, ...], int] = {}
    lanes = len(layout.stages[0].replicas[0])
    table = np.zeros((len(layout.stages), lanes), dtype=np.int64)
    for index, stage in enumerate(layout.stages):
        everyone = tuple(sorted({rank for ranks in stage.replicas for rank in ranks}))
        table[index] = numbers.setdefault(everyone, len(numbers))
    counts = GroupTable(kinds=(EXPERT_COUNTS,), groups=tuple(numbers), by=("stage",), table=table)
    return (counts, *loads)


def _trained(layout: PipelineLayout, balanced: Balanced) -> tuple[int, ...]:
    return tuple(stage for stage in balanced.stages if stage >= layout.frozen_stages)


def owes(layout: PipelineLayout, balanced: Balanced) -> BalancesExperts:
    return BalancesExperts(stages=_trained(layout, balanced), counts=balanced.counts, biases=balanced.biases)


PASS = Pass(
    name=NAME,
    options=options,
    apply=add_sums,
    last=True,
    refuse=refuse,
    groups=groups,
    owes=owes,
)
