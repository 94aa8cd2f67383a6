"""Work of methods in the bubbles of a program, after PipeFisher (Osawa et al., arXiv 2211.14133).

Each stage does its work once in a window of R steps. The first step of a window makes what the work needs.
A plan states behind which computation of its device each piece runs. A plan that fills no bubbles runs all of
it behind the last pass of the window's first step. A plan that leaves its windows open has no work yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
from weft.program.arrays import Ints, Mask
from weft.program.codes import numbered
from weft.program.kinds import FORWARD, KINDS, MAKES_GRADIENTS, is_any_of, is_compute
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.insert import insert
from weft.program.program import NONE, Columns, Edges


@dataclass(frozen=True, slots=True)
class FilledStage:
    """The items of a stage, and its window.

    Without runs in the window, all items run behind the passes of its first step.
    """

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
    return layout_problems(layout)


def layout_problems(layout: PipelineLayout) -> list[Violation]:
    """Return why the pipelines of a layout have no common bubbles."""
    found = []
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
    for (stage, work), path in product(enumerate(works), range(layout.paths)):
        placed = _placed(pipeline.columns, stage, path, work)
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


def computations(columns: Columns, device: int) -> tuple[Ints, Ints]:
    """Return the rows of a device's computations, step by step in order, and the first place of each step."""
    own = np.flatnonzero(is_compute(columns.kind) & (columns.rank == device))
    iteration = columns.iteration[own]
    steps = int(columns.iteration.max(initial=0)) + 1
    order = np.argsort(iteration, kind="stable")
    return own[order], np.searchsorted(iteration[order], np.arange(steps + 1))


def _placed(columns: Columns, stage: int, path: int, work: FilledStage) -> tuple[Columns, Ints, Mask] | None:
    """Return a stage's rows on a path, the row next to each, and True for those that come before it."""
    of_path = (columns.stage == stage) & (columns.replica == path)
    forwards = np.flatnonzero((columns.kind == FORWARD) & of_path)
    if not work.items or not len(forwards):
        return None
    device = int(columns.rank[forwards[0]])
    micro_batches = np.unique(columns.micro_batch[forwards])
    places, starts = computations(columns, device)
    runs = work.window.runs
    if work.serial:
        runs = _serial_runs(columns.kind[places[: starts[1]]], work.items, len(micro_batches))
    _require_whole(runs, stage, work, len(micro_batches))
    run, place = numbered(np.array([one.pieces for one in runs], dtype=np.int64))
    step, behind, item, first, _ = np.array(runs, dtype=np.int64)[run].T
    openings = np.arange(0, len(starts) - 1, work.window.steps)
    iteration = (openings[:, None] + step).ravel()
    behind, item, place = (np.tile(one, len(openings)) for one in (behind, item, first + place))
    found = starts[iteration] + np.maximum(behind, 0)
    if (beyond := np.flatnonzero(found >= starts[iteration + 1])).size:
        count = np.diff(starts)[iteration[beyond[0]]]
        problem = f"stage {stage}: behind computation {behind[beyond[0]]} of {count}"
        raise InputError(Violation(f"plan: methods: {NAME}: windows", problem, OPEN))
    kind, part, size, by_micro_batch = np.array(
        [(one.kind, one.part, one.bytes, one.by_micro_batch) for one in work.items], dtype=np.int64
    )[item].T
    rows = Columns.of(
        len(item),
        kind=kind,
        stage=stage,
        replica=path,
        rank=device,
        iteration=iteration,
        part=part,
        bytes=size,
        micro_batch=np.where(by_micro_batch, micro_batches[place], NONE),
    )
    anchors, before = places[found], behind < 0
    return rows, np.where(before, anchors, last_issued(columns, anchors)), before


def last_issued(columns: Columns, rows: Ints) -> Ints:
    """Return the last row issued behind each computation, before the next one or the next step."""
    ends = is_compute(columns.kind)
    for one in (columns.rank, columns.iteration):
        ends[1:] |= one[1:] != one[:-1]
    following = np.append(np.flatnonzero(ends), len(columns))
    last: Ints = following[np.searchsorted(following, rows, side="right")] - 1
    return last


def _serial_runs(kinds: Ints, items: Sequence[WorkRows], micro_batches: int) -> tuple[PieceRun, ...]:
    """Return runs of all items behind the last pass of a step, whose computations have these kinds."""
    last = int(np.flatnonzero(is_any_of(kinds, MAKES_GRADIENTS))[-1])
    return tuple(PieceRun(0, last, item, 0, one.count(micro_batches)) for item, one in enumerate(items))


def _require_whole(runs: Sequence[PieceRun], stage: int, work: FilledStage, micro_batches: int) -> None:
    """Check that a window does every piece of every item once, in its steps."""
    done = [np.zeros(one.count(micro_batches), dtype=np.int64) for one in work.items]
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
            sources, targets = np.flatnonzero(of == before), np.flatnonzero(of == item)
            earlier = np.searchsorted(sources, targets) - 1
            # What comes later in the cycle is of the cycle before: index -1 is the last one.
            for source, target, distance in zip(
                sources[earlier].tolist(), targets.tolist(), (earlier < 0).tolist(), strict=True
            ):
                firsts[source] = min(firsts.get(source, (2, 0)), (int(distance), target))
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
