"""Weights that several stages use at once: the gradients of their copies are added before any copy steps.

An extra reduction, apart from the reductions of stages, adds up the gradients of all copies in all replicas.
It comes last of a device's collectives, when everything that it waits for is under way. All copies then step
with the same gradient and stay equal bit by bit. Narayanan et al. (Megatron-LM, arXiv 2104.04473) do so for
the embedding on the first and the last stage.

If replicas shard their stages, they shard the copies with them. A stage's own reductions then add up the
gradient of its copy. The extra one exchanges the ranges that shards of several copies have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.replica_grid import ReplicaGrid
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import Violation
from weft.methods.sharding.groups import islands_of
from weft.methods.tying.kinds import REDUCE_TIED, TiesStages
from weft.predict.cost.memory import reduced_element_bytes, reduced_parameters, shards_copies
from weft.program.arrays import Ints
from weft.program.kinds import MAKES_GRADIENTS, STEP, is_any_of, kinds_writing
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.insert import insert
from weft.program.program import NONE, Columns, Edges

NAME = "tying"


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """A weight with a copy in each of several stages.

    Attributes:
        stages: the stages with a copy, rising.
        gradient_bytes: bytes of its gradient on one rank, as sent; of shards, those that a rank with the
            largest one sends.
    """

    stages: tuple[int, ...]
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Tied:
    """The weights that trained stages share, and the grid of ranks in the stages' replicas.

    `local`: each replica adds up its copies by itself. `sharers`: the replicas that shard a copy among
    themselves; 1 if copies are whole.
    """

    weights: tuple[TiedWeights, ...]
    grid: ReplicaGrid
    local: bool = False
    sharers: int = 1


def options(plan: Plan, graph: LayerGraph) -> Tied | None:
    """Return the parameters that layers of several stages use, with these stages; None if there are none."""
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    element, sharded = reduced_element_bytes(plan), shards_copies(plan)
    weights = []
    for one in graph.tied:
        stages = tuple(sorted({stage_of[layer] for layer in one.layers}))
        if len(stages) > 1 and one.parameters.terms:
            parameters = round(one.parameters(plan.shape(stages[0])))
            if sharded:
                others = len(stages) - 1
                parameters = others * min(parameters, max(_share(plan, graph, stage) for stage in stages))
            weights.append(TiedWeights(stages, element * parameters))
    if not weights:
        return None
    local = keeps_gradients_local(plan.sync)
    return Tied(tuple(weights), plan.grid(0), local, plan.sharers(0) if sharded else 1)


def _share(plan: Plan, graph: LayerGraph, stage: int) -> int:
    """Return the parameters of a rank's shard of a stage."""
    return -(-reduced_parameters(plan, graph, stage) // plan.sharers(stage))


def refuse(layout: PipelineLayout, tied: Tied, others: Mapping[str, Any]) -> list[Violation]:
    """Refuse ties that do not join trained stages, and lanes that are not whole groups of context ranks."""
    trained = range(layout.frozen_stages, len(layout.stages))
    problems = [
        Violation("layout", f"tied weights must have two or more trained stages, rising, not {one.stages}")
        for one in tied.weights
        if not _are_trained_stages(one.stages, trained)
    ]
    if tied.local and layout.paths > 1:
        problem = "copies on one rank belong to several replicas, which step by themselves"
        problems.append(Violation("tied weights", f"{layout.paths} paths: {problem}"))
    lanes, parts = len(layout.stages[0].replicas[0]), tied.grid.context
    if parts < 1 or lanes % parts:
        problem = f"replicas of {lanes} ranks are not whole groups of {parts} context ranks"
        problems.append(Violation("layout", problem))
    return problems


def _are_trained_stages(stages: tuple[int, ...], trained: range) -> bool:
    return len(stages) > 1 and sorted(set(stages)) == list(stages) and set(stages) <= set(trained)


def groups(layout: PipelineLayout, tied: Tied) -> Sequence[GroupTable]:
    """Return the groups of ranks with a copy of each weight; lanes that divide tokens are in one group."""
    return (_of_shards(layout, tied) if tied.sharers > 1 else _of_copies(layout, tied),)


def _of_shards(layout: PipelineLayout, tied: Tied) -> GroupTable:
    """Return the groups of ranks with all shards of each copy once: an island of every stage, in a lane."""
    lanes = range(len(layout.stages[0].replicas[0]))
    found: list[tuple[int, ...]] = []
    size = len(tied.weights), len(layout.stages), layout.replicas, len(lanes)
    table = np.full(size, NONE, dtype=np.int64)
    for part, one in enumerate(tied.weights):
        islands = (islands_of(layout.stages[stage].replicas, tied.sharers) for stage in one.stages)
        for together, lane in product(zip(*islands, strict=True), lanes):
            places = [(stage, copy) for stage, of in zip(one.stages, together, strict=True) for copy in of]
            for stage, copy in places:
                table[part, stage, copy, lane] = len(found)
            members = (layout.stages[stage].replicas[copy][lane] for stage, copy in places)
            found.append(tuple(dict.fromkeys(members)))
    return GroupTable(kinds=(REDUCE_TIED,), groups=tuple(found), by=("part", "stage", "replica"), table=table)


def _of_copies(layout: PipelineLayout, tied: Tied) -> GroupTable:
    every = slice(None)
    apart = [slice(one, one + 1) for one in range(layout.replicas)] if tied.local else [every]
    found = []
    for one, together in product(tied.weights, apart):
        replicas = chain.from_iterable(layout.stages[stage].replicas[together] for stage in one.stages)
        alike = zip(*map(tied.grid.context_groups, replicas), strict=True)
        found += [tuple(dict.fromkeys(chain.from_iterable(copies))) for copies in alike]
    table = np.arange(len(found), dtype=np.int64).reshape(len(tied.weights), len(apart), -1)
    whole = np.tile(table, (1, 1, tied.grid.context))
    by, whole = (("part", "replica"), whole) if tied.local else (("part",), whole[:, 0])
    return GroupTable(kinds=(REDUCE_TIED,), groups=tuple(found), by=by, table=whole)


def tie(pipeline: LoweredPipeline, layout: PipelineLayout, tied: Tied) -> LoweredPipeline:
    """Add the reductions of tied weights to one pipeline: one on every device with a copy.

    A device with several copies adds them up first; its reduction has the coordinates of the first copy.
    """
    columns = pipeline.columns
    steps = np.flatnonzero(columns.kind == STEP)
    reductions = kinds_writing("reduced_gradient", "island_sum")
    makers = np.flatnonzero(is_any_of(columns.kind, reductions if tied.sharers > 1 else MAKES_GRADIENTS))
    rows: list[tuple[int, int, int, int, int, int]] = []
    edges: list[Edges] = []
    for part, weights in enumerate(tied.weights):
        stepped = steps[np.isin(columns.stage[steps], weights.stages)]
        made = makers[np.isin(columns.stage[makers], weights.stages)]
        for device in np.unique(columns.rank[stepped]).tolist():
            here = stepped[columns.rank[stepped] == device]
            first = here[np.argmin(columns.stage[here])]
            anchor = steps[np.searchsorted(columns.rank[steps], device)]
            new = len(columns) + len(rows)
            rows.append(
                (
                    int(columns.stage[first]),
                    int(columns.replica[first]),
                    part,
                    device,
                    weights.gradient_bytes,
                    int(anchor),
                )
            )
            before = made[columns.rank[made] == device]
            edges += [
                Edges.of(before, np.full(len(before), new)),
                Edges.of(np.full(len(here), new), here),
            ]
    stage, replica, number, device_of, size, anchors = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    added = Columns.of(
        len(rows), kind=REDUCE_TIED, stage=stage, replica=replica, part=number, rank=device_of, bytes=size
    )
    return insert(pipeline, added, anchors, _before(anchors), Edges.join(edges))


def _before(anchors: Ints) -> Ints:
    """Return turns that keep rows in their order, all before their anchors."""
    turns: Ints = np.arange(len(anchors), dtype=np.int64) - len(anchors)
    return turns


PASS = Pass(
    name=NAME,
    options=options,
    apply=tie,
    after=("sharding",),
    deals=True,
    refuse=refuse,
    groups=groups,
    owes=lambda layout, tied: TiesStages(
        stages=tuple(one.stages for one in tied.weights), sharded=tied.sharers > 1
    ),
)
