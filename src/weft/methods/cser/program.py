"""CSER (Xie et al., arXiv 2007.13221): replicas step by themselves and average parts of updates and errors.

After each step the replicas of a stage average a part of their updates. After every H-th step they also
average a part of their errors. These are the only collectives over replicas. They stand at the end of a
device's step, in the order of the stages. The next step reads the weights after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import options_in
from weft.errors import Violation
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.kinds import RESET_ERROR, SYNCHRONISE_UPDATE, ResetsErrors
from weft.methods.cser.options import NAME, CserOptions
from weft.methods.cser.traffic import MeetingBytes, part_sizes, stage_bytes
from weft.methods.cser.verify import check_resets
from weft.methods.local_averaging.program import NOBODY
from weft.predict.cost.memory import gradient_element_bytes
from weft.program.arrays import Ints, Mask
from weft.program.kinds import READS_WEIGHTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, replica_groups
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The steps with meetings, the bytes of each stage's meetings on one rank, and reasons against them."""

    owed: ResetsErrors
    stages: tuple[MeetingBytes, ...]
    problems: tuple[Violation, ...] = ()


def owed_by(options: CserOptions) -> ResetsErrors:
    """Return the meetings that options ask for."""
    ratios = options.ratios
    return ResetsErrors(
        every=ratios.every if ratios.reset is not None else 0,
        updates=ratios.update is not None,
        instead=options.variant == "code",
    )


def real_ratio(options: CserOptions, plan: Plan, graph: LayerGraph) -> float:
    """Return the bytes of a rank's weights over those of its messages in a mean step, of all stages."""
    owed, stages = owed_by(options), range(len(plan.stages))
    cycle = range(owed.every or 1)
    updates, resets = (sum(map(after, cycle)) for after in (owed.updates_after, owed.resets_after))
    sent = weights = 0
    for stage in stages:
        messages = 1 if options.compressor == "blocks" else len(plan.stages[stage].replicas)
        meetings = stage_bytes(options, plan, graph, stage)
        sent += (updates * meetings.update + resets * meetings.reset) // messages
        sizes = part_sizes(graph, plan.stages[stage].layers, plan.shape(stage))
        weights += gradient_element_bytes(plan) * sum(sizes)
    return weights * len(cycle) / sent


def options(plan: Plan, graph: LayerGraph) -> ResetPlan | None:
    found = options_in(plan, NAME, CserOptions)
    if found is None:
        return None
    stages = (stage_bytes(found, plan, graph, stage) for stage in range(len(plan.stages)))
    return ResetPlan(owed_by(found), tuple(stages), tuple(_too_few_blocks(found, plan, graph))[:1])


def _too_few_blocks(options: CserOptions, plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield a violation for each part of a stage with fewer blocks than the ratio of a meeting."""
    ratio = options.ratios.largest
    for index, stage in enumerate(plan.stages if options.compressor == "blocks" else ()):
        for size in part_sizes(graph, stage.layers, plan.shape(index)):
            blocks = Blocks.of(size, ratio, options.block)
            if not blocks.admit(ratio):
                problem = f"stage {index}: a ratio of {ratio:g} keeps none of {blocks.count} blocks"
                nearest = f"block {int(size / ratio)}" if size >= ratio else f"a ratio of {size}"
                yield Violation("sync", f"{problem} of {blocks.length} numbers", nearest)


def refuse(layout: PipelineLayout, asked: ResetPlan, others: Mapping[str, Any]) -> list[Violation]:
    alone = [Violation("sync", NOBODY, "dense")] if layout.replicas == 1 else []
    return alone or list(asked.problems)


def add_meetings(pipeline: LoweredPipeline, layout: PipelineLayout, asked: ResetPlan) -> LoweredPipeline:
    """Add the meetings to one pipeline's cycle; readers of a step's weights follow its last meeting."""
    columns, owed = pipeline.columns, asked.owed
    resets = (columns.kind == STEP) & _where(columns.iteration, owed.resets_after)
    updates = (columns.kind == STEP) & _where(columns.iteration, owed.updates_after)
    last = np.arange(len(columns), dtype=np.int64)
    steps, rows, edges = np.zeros(0, dtype=np.int64), [], []
    for kind, chosen, which in ((SYNCHRONISE_UPDATE, updates, 0), (RESET_ERROR, resets, 1)):
        follow = np.flatnonzero(chosen)
        sizes = np.array([stage[which] for stage in asked.stages], dtype=np.int64)
        own = len(columns) + len(steps) + np.arange(len(follow), dtype=np.int64)
        rows.append(_meetings(columns, follow, kind, sizes))
        edges.append(Edges.of(last[follow], own))
        last[follow] = own
        steps = np.concatenate([steps, follow])
    met = (last[pipeline.edges.source] != pipeline.edges.source) & is_any_of(
        columns.kind[pipeline.edges.target], READS_WEIGHTS
    )
    source = np.where(met, last[pipeline.edges.source], pipeline.edges.source)
    moved = Edges(source=source, target=pipeline.edges.target, distance=pipeline.edges.distance)
    # The rows of a device's step are neighbours.
    place = columns.rank * (int(columns.iteration.max(initial=0)) + 1) + columns.iteration
    anchors = np.searchsorted(place, place[steps], side="right") - 1
    added = Columns.join(rows)
    turn = 1 + 2 * columns.stage[steps] + (added.kind == RESET_ERROR)
    return insert(LoweredPipeline(columns, moved), added, anchors, turn, Edges.join(edges))


def _where(iteration: Ints, holds: Callable[[int], bool]) -> Mask:
    table = np.array([holds(step) for step in range(int(iteration.max(initial=0)) + 1)], dtype=bool)
    found: Mask = table[iteration]
    return found


def _meetings(columns: Columns, steps: Ints, kind: int, sizes: Ints) -> Columns:
    return Columns.of(
        len(steps),
        kind=kind,
        bytes=sizes[columns.stage[steps]],
        **{name: getattr(columns, name)[steps] for name in ("stage", "replica", "iteration", "rank")},
    )


def groups(layout: PipelineLayout, asked: ResetPlan) -> tuple[GroupTable, ...]:
    """Return the groups of all replicas of a stage, lane by lane."""
    everybody = [list(range(layout.replicas))]
    kinds = (SYNCHRONISE_UPDATE, RESET_ERROR)
    return (replica_groups(kinds, layout, [everybody] * len(layout.stages)),)


PASS = Pass(
    name=NAME,
    options=options,
    cycle=lambda asked: asked.owed.every or 1,
    apply_to_cycle=add_meetings,
    last=True,
    refuse=refuse,
    groups=groups,
    owes=lambda layout, asked: asked.owed,
    check=check_resets,
)
