"""Work of methods in the bubbles of a program, after PipeFisher (Osawa et al., arXiv 2211.14133).

Each stage does its work once in a window of R steps. The first step of a window makes what the work needs.
A plan states behind which computation of its device each piece runs. A plan that fills no bubbles runs all of
it behind the last pass of the window's first step. A plan that leaves its windows open has no work yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.decide import decide
from weft.methods.bubble_filling.kinds import FillsBubbles
from weft.methods.bubble_filling.options import NAME, OPEN, PieceRun, StageWindow, options_of, read_windows
from weft.methods.bubble_filling.verify import check_windows
from weft.methods.bubble_filling.works import WorkRows, items_of, works_of
from weft.program.arrays import Ints
from weft.program.kinds import FORWARD, KINDS, MAKES_GRADIENTS, is_any_of, is_compute
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges


@dataclass(frozen=True, slots=True)
class FilledStage:
    """The items of a stage, and its window; without runs, all run behind the passes of its first step."""

    items: tuple[WorkRows, ...]
    window: StageWindow

    @property
    def serial(self) -> bool:
        return bool(self.items) and not self.window.runs


def options(plan: Plan, graph: LayerGraph) -> tuple[FilledStage, ...] | None:
    works, asked = works_of(plan), options_of(plan)
    if not works or (asked is not None and asked.windows == OPEN):
        return None
    stages = range(len(plan.stages))
    items = [items_of(plan, graph, stage) for stage in stages]
    if asked is not None:
        windows = read_windows(asked.windows)
        if len(windows) != len(stages):
            problem = f"{len(windows)} windows for {len(stages)} stages"
            raise InputError(Violation(f"plan: methods: {NAME}: windows", problem, OPEN))
    else:
        every = min(one.every(plan) or 1 for one in works)
        windows = [StageWindow(every, ())] * len(stages)
    return tuple(FilledStage(tuple(some), window) for some, window in zip(items, windows, strict=True))


def refuse(
    layout: PipelineLayout, works: tuple[FilledStage, ...], others: Mapping[str, Any]
) -> list[Violation]:
    found = []
    if layout.paths > 1:
        found.append(Violation(NAME, "the order has two pipelines on the same devices", "schedule 1f1b"))
    if len(set(layout.micro_batches)) > 1:
        problem = "replicas with unlike shares of the batch have unlike bubbles"
        found.append(Violation(NAME, problem, "equal shares"))
    if any(stage.splits > 1 for stage in layout.stages):
        found.append(Violation(NAME, "a stage splits micro-batches", "no splits"))
    return found


def cycle(works: tuple[FilledStage, ...]) -> int:
    return int(np.lcm.reduce([one.window.steps for one in works]))


def fill(
    pipeline: LoweredPipeline, layout: PipelineLayout, works: tuple[FilledStage, ...]
) -> LoweredPipeline:
    """Add the work of all stages to one pipeline's cycle."""
    rows, anchors, turns, edges = [], [], [], []
    present, turn = len(pipeline.columns), 0
    for stage, work in enumerate(works):
        placed = _placed(pipeline.columns, stage, work)
        if placed is None:
            continue
        added, behind, before = placed
        rows.append(added)
        anchors.append(behind)
        order = turn + 1 + np.arange(len(added), dtype=np.int64)
        turns.append(np.where(before, order - np.iinfo(np.int32).max, order))
        first = present + turn
        turn += len(added)
        edges.append(_edges(work.items, added, first))
    if not rows:
        return pipeline
    joined = Edges.join(edges)
    return insert(pipeline, Columns.join(rows), np.concatenate(anchors), np.concatenate(turns), joined)


def computations(columns: Columns, device: int, iteration: int) -> Ints:
    """Return the rows of a device's computations in one step, in order."""
    own = is_compute(columns.kind) & (columns.rank == device) & (columns.iteration == iteration)
    return np.flatnonzero(own)


def _placed(columns: Columns, stage: int, work: FilledStage) -> tuple[Columns, Ints, Ints] | None:
    """Return a stage's rows, the row next to each, and True for those that come before that one."""
    forwards = np.flatnonzero((columns.kind == FORWARD) & (columns.stage == stage))
    if not work.items or not len(forwards):
        return None
    device, replica = int(columns.rank[forwards[0]]), int(columns.replica[forwards[0]])
    micro_batches = np.unique(columns.micro_batch[forwards])
    steps = int(columns.iteration.max(initial=0)) + 1
    runs = _serial_runs(columns, device, work.items, len(micro_batches)) if work.serial else work.window.runs
    _require_whole(runs, stage, work, len(micro_batches))
    parts, anchors, before = [], [], []
    for opening in range(0, steps, work.window.steps):
        for run in runs:
            item = work.items[run.item]
            iteration = opening + run.step
            places = computations(columns, device, iteration)
            if run.behind >= len(places):
                problem = f"stage {stage}: behind computation {run.behind} of {len(places)}"
                raise InputError(Violation(f"plan: methods: {NAME}: windows", problem, OPEN))
            anchor = int(places[max(run.behind, 0)])
            parts.append(
                Columns.of(
                    run.pieces,
                    kind=item.kind,
                    stage=stage,
                    replica=replica,
                    rank=device,
                    iteration=iteration,
                    part=item.part,
                    bytes=item.bytes,
                    micro_batch=micro_batches[run.first : run.first + run.pieces]
                    if item.by_micro_batch
                    else -1,
                )
            )
            anchors += [anchor] * run.pieces
            before += [run.behind < 0] * run.pieces
    found = np.array(anchors, dtype=np.int64)
    is_before = np.array(before, dtype=bool)
    return Columns.join(parts), np.where(is_before, found, _last_issued(columns, found)), is_before


def _last_issued(columns: Columns, rows: Ints) -> Ints:
    """Return the last row that each computation's host issues before the next one of its device."""
    computes = np.flatnonzero(is_compute(columns.kind))
    following = np.append(computes, len(columns))[np.searchsorted(computes, rows, side="right")]
    ends = np.searchsorted(columns.rank, columns.rank[rows], side="right")
    last: Ints = np.minimum(following, ends) - 1
    return last


def _serial_runs(
    columns: Columns, device: int, items: Sequence[WorkRows], micro_batches: int
) -> tuple[PieceRun, ...]:
    """Return runs of all items behind the last pass of the first step."""
    places = computations(columns, device, 0)
    last = int(np.flatnonzero(is_any_of(columns.kind[places], MAKES_GRADIENTS))[-1])
    counts = (micro_batches if one.by_micro_batch else 1 for one in items)
    return tuple(PieceRun(0, last, item, 0, count) for item, count in enumerate(counts))


def _require_whole(runs: Sequence[PieceRun], stage: int, work: FilledStage, micro_batches: int) -> None:
    """Check that a window does every piece of every item once, in its steps."""
    done = [np.zeros(micro_batches if one.by_micro_batch else 1, dtype=np.int64) for one in work.items]
    legal = all(run.item < len(done) and run.step < work.window.steps for run in runs)
    for run in runs if legal else ():
        legal &= run.first + run.pieces <= len(done[run.item])
        done[run.item][run.first : run.first + run.pieces] += 1
    if not legal or any((one != 1).any() for one in done):
        problem = f"stage {stage}: its window does not do each piece of work once"
        raise InputError(Violation(f"plan: methods: {NAME}: windows", problem, OPEN))


def _edges(items: Sequence[WorkRows], added: Columns, first: int) -> Edges:
    """Return the edges between work on different streams; computations of a device are in order anyway."""
    place = {(one.kind, one.part): item for item, one in enumerate(items)}
    of = np.array([place[key] for key in zip(added.kind.tolist(), added.part.tolist(), strict=True)])
    apart = [KINDS[one.kind].stream != "compute" for one in items]
    # Rows are listed in the order of the device. Of those that follow one row, the first stands for all.
    firsts: dict[int, tuple[int, int]] = {}
    for item, one in enumerate(items):
        for before in one.after:
            if apart[item] == apart[before]:
                continue
            sources = np.flatnonzero(of == before)
            for target in np.flatnonzero(of == item).tolist():
                earlier = sources[sources < target]
                # What comes later in the cycle is of the cycle before.
                source, distance = (int(earlier[-1]), 0) if len(earlier) else (int(sources[-1]), 1)
                firsts[source] = min(firsts.get(source, (2, 0)), (distance, target))
    rows = [(first + source, first + target, distance) for source, (distance, target) in firsts.items()]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Edges(source=table[:, 0], target=table[:, 1], distance=table[:, 2])


PASS = Pass(
    name=NAME,
    options=options,
    cycle=cycle,
    apply_to_cycle=fill,
    last=True,
    refuse=refuse,
    decide=decide,
    owes=lambda layout, works: FillsBubbles(
        steps=tuple(one.window.steps for one in works), items=tuple(one.items for one in works)
    ),
    check=check_windows,
)
