"""CSER (Xie et al., arXiv 2007.13221): replicas step by themselves and average parts of updates and errors.

After each step the replicas of a stage average a part of their updates. After every H-th step they also
average a part of their errors. These are the only collectives over replicas. They stand at the end of a
device's step, in the order of the stages. The next step reads the weights after them.

A replica that misses resets has no instructions meanwhile, and the others meet without it. It comes back by a
reset. Before this one, those present give it the weights minus errors, which all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import options_in
from weft.errors import Violation
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.kinds import REJOIN, RESET_ERROR, SYNCHRONISE_UPDATE, ResetsErrors
from weft.methods.cser.options import NAME, CserOptions
from weft.methods.cser.traffic import MeetingBytes, part_sizes, stage_bytes
from weft.methods.cser.verify import check_resets
from weft.methods.local_averaging.program import NOBODY, no_rest
from weft.predict.cost.memory import gradient_element_bytes
from weft.program.arrays import Ints, Mask
from weft.program.kinds import READS_WEIGHTS, STEP, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, replica_groups
from weft.program.passes.insert import insert
from weft.program.program import NONE, Columns, Edges

# The place of each kind in `MeetingBytes`.
_BYTES_OF = {kind: place for place, kind in enumerate((SYNCHRONISE_UPDATE, REJOIN, RESET_ERROR))}


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The steps with meetings, the bytes of each stage's meetings on one rank, and reasons against them.

    Attributes:
        taken: by replica, the steps of a cycle that it takes; None: all of them.
    """

    owed: ResetsErrors
    stages: tuple[MeetingBytes, ...]
    taken: tuple[tuple[int, ...], ...] | None
    problems: tuple[Violation, ...] = ()


def owed_by(options: CserOptions) -> ResetsErrors:
    """Return the meetings that options ask for."""
    ratios = options.ratios
    return ResetsErrors(
        every=ratios.every if ratios.reset is not None else 0,
        updates=ratios.update is not None,
        instead=options.variant == "code",
        absences=options.absences,
    )


def real_ratio(options: CserOptions, plan: Plan, graph: LayerGraph) -> float:
    """Return the bytes of a rank's weights over those of its messages in a mean step, of all stages.

    The rank's replica is never absent, and none comes back.
    """
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
    stages = tuple(stage_bytes(found, plan, graph, stage) for stage in range(len(plan.stages)))
    taken = found.taken(len(plan.stages[0].replicas)) if found.absent else None
    return ResetPlan(owed_by(found), stages, taken, tuple(_too_few_blocks(found, plan, graph))[:1])


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
    if layout.replicas == 1:
        return [Violation("sync", NOBODY, "dense")]
    absences = asked.owed.absences
    if (problem := absences.problem(layout.replicas)) is not None:
        return [Violation("sync.absent", problem)]
    resting = no_rest(layout, others, "sync.absent", "no absence") if absences.missed else []
    return [*asked.problems, *resting]


def add_meetings(pipeline: LoweredPipeline, layout: PipelineLayout, asked: ResetPlan) -> LoweredPipeline:
    """Add the meetings to one pipeline's cycle; readers of a step's weights follow its last meeting."""
    columns, owed = pipeline.columns, asked.owed
    stepping = columns.kind == STEP
    updates, resets, rejoins = (
        stepping & _where(columns.iteration, holds)
        for holds in (owed.updates_after, owed.resets_after, lambda step: bool(owed.absences.ended_by(step)))
    )
    returns = _returns(columns.iteration, asked)
    away = stepping & (returns != NONE)
    last = np.arange(len(columns), dtype=np.int64)
    rows, edges = [], []
    added = 0
    for kind, chosen, iteration in (
        (SYNCHRONISE_UPDATE, updates, columns.iteration),
        (REJOIN, rejoins, columns.iteration),
        (RESET_ERROR, resets, columns.iteration),
        (REJOIN, away, returns),
        (RESET_ERROR, away, returns),
    ):
        follow = np.flatnonzero(chosen)
        own = len(columns) + added + np.arange(len(follow), dtype=np.int64)
        sizes = np.array([stage[_BYTES_OF[kind]] for stage in asked.stages], dtype=np.int64)
        rows.append(_meetings(columns, follow, kind, iteration[follow], sizes))
        edges.append(Edges.of(last[follow], own))
        last[follow] = own
        added += len(follow)
    met = (last[pipeline.edges.source] != pipeline.edges.source) & is_any_of(
        columns.kind[pipeline.edges.target], READS_WEIGHTS
    )
    source = np.where(met, last[pipeline.edges.source], pipeline.edges.source)
    moved = Edges(source=source, target=pipeline.edges.target, distance=pipeline.edges.distance)
    meetings = Columns.join(rows)
    # The rows of a device's step are neighbours. A return may come after the last step.
    steps = 1 + max(int(one.iteration.max(initial=0)) for one in (columns, meetings))
    place, meeting_place = (one.rank * steps + one.iteration for one in (columns, meetings))
    anchors = np.searchsorted(place, meeting_place, side="right") - 1
    # The meetings of a stage after a step keep their order.
    turn = 1 + meetings.stage + len(asked.stages) * meetings.iteration
    return insert(LoweredPipeline(columns, moved), meetings, anchors, turn, Edges.join(edges))


def _returns(iteration: Ints, asked: ResetPlan) -> Ints:
    """Return, for each row, the step of the reset by which its replica comes back; -1 where it goes on.

    The steps that a pipeline takes tell of its absences.
    """
    cycle = asked.owed.cycle
    steps = np.unique(iteration)
    after = np.append(steps[1:], -(-(steps[-1] + 1) // cycle) * cycle + steps[0])
    table = np.where(after == steps + 1, NONE, after - 1)
    found: Ints = table[np.searchsorted(steps, iteration)]
    return found


def _where(iteration: Ints, holds: Callable[[int], bool]) -> Mask:
    table = np.array([holds(step) for step in range(int(iteration.max(initial=0)) + 1)], dtype=bool)
    found: Mask = table[iteration]
    return found


def _meetings(columns: Columns, steps: Ints, kind: int, iteration: Ints, sizes: Ints) -> Columns:
    return Columns.of(
        len(steps),
        kind=kind,
        iteration=iteration,
        bytes=sizes[columns.stage[steps]],
        **{name: getattr(columns, name)[steps] for name in ("stage", "replica", "rank")},
    )


def groups(layout: PipelineLayout, asked: ResetPlan) -> tuple[GroupTable, ...]:
    """Return the groups of the replicas of a stage that meet after each step, lane by lane."""
    absences, replicas = asked.owed.absences, range(layout.replicas)

    def in_each_step(kinds: tuple[int, ...], there: Callable[[int, int], bool]) -> GroupTable:
        members = [tuple(one for one in replicas if there(one, step)) for step in range(absences.cycle)]
        tables = {
            some: replica_groups(kinds, layout, [[some]] * len(layout.stages))
            for some in dict.fromkeys(members)
        }
        firsts = accumulate((len(one.groups) for one in tables.values()), initial=0)
        numbered = {
            some: one.numbered_from(first).table
            for (some, one), first in zip(tables.items(), firsts, strict=False)
        }
        return GroupTable(
            kinds=kinds,
            groups=tuple(group for one in tables.values() for group in one.groups),
            by=("iteration", "stage", "replica"),
            table=np.stack([numbered[some] for some in members]),
        )

    if not absences.missed:
        kinds = (SYNCHRONISE_UPDATE, RESET_ERROR)
        return (replica_groups(kinds, layout, [[list(replicas)]] * len(layout.stages)),)
    return (
        in_each_step((SYNCHRONISE_UPDATE,), absences.computes),
        in_each_step((REJOIN, RESET_ERROR), absences.meets),
    )


PASS = Pass(
    name=NAME,
    options=options,
    cycle=lambda asked: asked.owed.cycle,
    taken=lambda asked: asked.taken,
    apply_to_cycle=add_meetings,
    last=True,
    refuse=refuse,
    groups=groups,
    owes=lambda layout, asked: asked.owed,
    check=check_resets,
)
