"""The assembly of lowered pipelines into the Program of all ranks, or into the part of one rank.

Every pipeline and lane is a copy of a lowered pipeline with its own ranks and micro-batches. If stages have
unlike numbers of lanes, the lowered pipeline has them all already (`weft.program.lanes`). Rows are sorted by
rank, so the copies' row counts alone give the first row of each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Ints, Mask
from weft.program.codes import numbered
from weft.program.kinds import is_collective
from weft.program.lanes import LanePlaces
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, renumber
from weft.program.passes import PassList
from weft.program.program import NONE, Columns, Edges, Obligations, Owed, Program
from weft.program.rank_program import RankProgram
from weft.program.splits import per_micro_batch


class PipelineWork(NamedTuple):
    """The micro-batches of a pipeline's steps, the steps of a cycle that it takes, and its stages' lanes."""

    micro_batches: int
    taken: tuple[int, ...]
    lanes: tuple[int, ...]


def pipeline_works(layout: PipelineLayout, taken: Sequence[tuple[int, ...]]) -> tuple[PipelineWork, ...]:
    """Return the work of each pipeline; `taken` has its steps of a cycle."""
    lanes = map(layout.pipeline_lanes, range(layout.pipelines))
    each = list(zip(layout.pipeline_micro_batches, taken, lanes, strict=True))
    # Thousands of pipelines share few kinds of work.
    made = {work: PipelineWork(*work) for work in set(each)}
    return tuple(made[work] for work in each)


@dataclass(frozen=True, kw_only=True)
class LoweredLayout:
    """A valid layout with its lowered pipelines, by their work.

    Attributes:
        taken: by pipeline, the steps of a cycle that it takes.
        pipelines: with ranks that count places (`weft.program.lanes`).
        beside: the rows of ranks that hold no stage, with these ranks.
        purpose, schedule: as in the program.
    """

    layout: PipelineLayout
    passes: PassList
    taken: tuple[tuple[int, ...], ...]
    pipelines: Mapping[PipelineWork, LoweredPipeline]
    beside: LoweredPipeline
    purpose: str
    schedule: str = ""

    @cached_property
    def works(self) -> tuple[PipelineWork, ...]:
        """The work of each pipeline."""
        return pipeline_works(self.layout, self.taken)

    @cached_property
    def places(self) -> tuple[tuple[Ints, LanePlaces], ...]:
        """The numbers of pipelines whose stages have equally many lanes, and their places."""
        numbers = defaultdict[tuple[int, ...], list[int]](list)
        for pipeline, work in enumerate(self.works):
            numbers[work.lanes].append(pipeline)
        return tuple(
            (np.array(alike, dtype=np.int64), LanePlaces.of(self.layout, alike)) for alike in numbers.values()
        )

    def ranks_of(self, pipeline: int) -> tuple[LanePlaces, Ints]:
        """Return the places of a pipeline, and their ranks in its copies, shape (places, copies)."""
        places, index = next(
            (places, index)
            for alike, places in self.places
            for index in np.flatnonzero(alike == pipeline).tolist()
        )
        return places, places.ranks[index]


def assemble(lowered: LoweredLayout, only_replica: int | None = None) -> Program:
    """Build the Program: copy each pipeline, or only one replica's, to its ranks and micro-batches.

    Raises:
        InputError: when there is no replica `only_replica`.
    """
    layout, passes = lowered.layout, lowered.passes
    kept = _kept_pipelines(layout, only_replica)
    meetings = passes.groups(layout)
    works = lowered.works
    parts: list[Columns] = []
    edges: list[Edges] = []
    first_row = 0
    for pipeline in kept:
        one = lowered.pipelines[works[pipeline]]
        places, ranks = lowered.ranks_of(pipeline)
        for number in range(ranks.shape[1]):
            copy = _copy(layout, one.columns, ranks[:, number], pipeline)
            lane = places.lane_of(layout, one.columns, number)
            parts.append(replace(copy, group=meetings.of(copy, lane)))
            shifted = one.edges.source + first_row, one.edges.target + first_row
            edges.append(replace(one.edges, source=shifted[0], target=shifted[1]))
            first_row += len(one.columns)
    beside, within = lowered.beside
    parts.append(replace(beside, group=meetings.of(beside, np.zeros(len(beside), dtype=np.int64))))
    edges.append(replace(within, source=within.source + first_row, target=within.target + first_row))
    columns = Columns.join(parts)
    order = np.argsort(columns.rank, kind="stable")
    meets = is_collective(columns.kind).any()
    return Program(
        ranks=layout.ranks,
        steps_per_cycle=passes.steps_per_cycle,
        columns=columns.take(order),
        edges=renumber(Edges.join(edges), order),
        groups=meetings.groups if meets else (),
        kin=meetings.kin if meets else None,
        obligations=_obligations(lowered, _held(layout, kept), passes.owed(layout)),
        schedule=lowered.schedule,
        kept_replica=only_replica,
    )


def assemble_part(lowered: LoweredLayout, rank: int) -> RankProgram:
    """Build the part of one rank, with its positions in the whole program.

    Raises:
        InputError: when the layout has no such rank.
    """
    layout, passes = lowered.layout, lowered.passes
    found = np.argwhere(layout.rank_table == rank)
    if rank in layout.server_ranks:
        one, place, here, held = lowered.beside, rank, np.arange(layout.ranks), _held(layout, [])
        copy = one.columns.take(np.flatnonzero(one.columns.rank == rank))
        lane = np.zeros(len(copy), dtype=np.int64)
    elif len(found):
        pipeline = int(found[0, 0])
        places, ranks = lowered.ranks_of(pipeline)
        place, number = np.argwhere(ranks == rank)[0].tolist()
        one, here = lowered.pipelines[lowered.works[pipeline]], ranks[:, number]
        mine = one.columns.take(np.flatnonzero(one.columns.rank == place))
        copy, lane = _copy(layout, mine, here, pipeline), places.lane_of(layout, mine, number)
        held = _held(layout, [pipeline], int(places.device[place]))
    else:
        problem = f"{rank} holds no stage; ranks 0 to {layout.ranks - 1} do"
        raise InputError(Violation("rank", problem, str(layout.ranks - 1)))
    meetings = passes.groups(layout)
    columns = replace(copy, group=meetings.of(copy, lane))
    firsts, place_of = _first_rows(lowered), one.columns.rank
    # Rows of a lowered pipeline are sorted by place.
    within = np.arange(len(place_of), dtype=np.int64) - np.searchsorted(place_of, place_of)
    position = firsts[here[place_of]] + within
    touching = (place_of[one.edges.source] == place) | (place_of[one.edges.target] == place)
    return RankProgram(
        rank=rank,
        ranks=layout.ranks,
        micro_batches=sum(layout.micro_batches),
        steps_per_cycle=passes.steps_per_cycle,
        first_row=int(firsts[rank]),
        columns=columns,
        edges=one.edges.take(touching).at(position),
        groups=meetings.members(np.unique(columns.group)),
        obligations=_obligations(lowered, held, passes.owed(layout)),
    )


def _first_rows(lowered: LoweredLayout) -> Ints:
    """Return the first row of each rank."""
    works = lowered.works
    of_rank = np.bincount(lowered.beside.columns.rank, minlength=lowered.layout.ranks)
    for alike, places in lowered.places:
        made = {works[pipeline] for pipeline in alike.tolist()}
        counts = {
            work: np.bincount(lowered.pipelines[work].columns.rank, minlength=places.ranks.shape[1])
            for work in made
        }
        rows = np.stack([counts[works[pipeline]] for pipeline in alike.tolist()])
        of_rank[places.ranks] = rows[..., None]
    return np.cumsum(of_rank) - of_rank


def _kept_pipelines(layout: PipelineLayout, only_replica: int | None) -> Sequence[int]:
    """Return all pipelines, or the pipeline of one replica."""
    if only_replica is None:
        return range(layout.pipelines)
    last = layout.replicas - 1
    if not 0 <= only_replica <= last:
        near = str(min(max(only_replica, 0), last))
        raise InputError(Violation("only_replica", f"{only_replica} is not one of 0..{last}", near))
    return (only_replica // layout.paths,)


class _Held(NamedTuple):
    """Replicas of stages, one per entry; `path` is the first of a replica's paths, over all pipelines."""

    stage: Ints
    replica: Ints
    path: Ints


def _held(layout: PipelineLayout, pipelines: Sequence[int], device: int | None = None) -> _Held:
    """Return the replicas of all stages in these pipelines; `device`: on this device of them only."""
    copies = layout.path_copies
    # Of paths that share a replica, the first stands for it.
    wanted = np.diff(copies, axis=0, prepend=-1) != 0
    if device is not None:
        wanted &= layout.placement == device
    path, stage = np.nonzero(wanted)
    pipeline = np.repeat(np.array(pipelines, dtype=np.int64), len(path))
    path, stage = (np.tile(one, len(pipelines)) for one in (path, stage))
    replica = pipeline * np.array(layout.copies, dtype=np.int64)[stage] + copies[path, stage]
    return _Held(stage, replica, pipeline * layout.paths + path)


def _copy(layout: PipelineLayout, columns: Columns, ranks: Ints, pipeline: int) -> Columns:
    """Return the rows of one copy of a pipeline; `ranks` has shape (places,)."""
    micro_batch, copies = columns.micro_batch, np.array(layout.copies, dtype=np.int64)
    first = layout.first_micro_batch[pipeline * layout.paths]
    each = per_micro_batch(columns, layout.splits)
    return replace(
        columns,
        rank=ranks[columns.rank],
        peer=np.where(columns.peer == NONE, NONE, ranks[columns.peer]),
        micro_batch=np.where(micro_batch == NONE, NONE, micro_batch + first * each),
        replica=pipeline * copies[np.maximum(columns.stage, 0)] + columns.replica,
    )


def _obligations(lowered: LoweredLayout, held: _Held, methods: Mapping[str, Owed]) -> Obligations:
    """Return the obligations of these replicas of stages."""
    layout = lowered.layout
    number = {taken: index for index, taken in enumerate(dict.fromkeys(lowered.taken))}
    takes = np.array([np.isin(np.arange(lowered.passes.steps_per_cycle), taken) for taken in number])
    runs = takes[[number[taken] for taken in lowered.taken]][held.path // layout.paths]
    steps = np.stack([held.stage, held.replica], axis=1)
    of, passes = _passes(layout, held)
    passes, steps = _in_each_step(passes, runs[of]), _in_each_step(steps, runs)
    backward, steps = (rows[rows[:, 0] >= layout.frozen_stages] for rows in (passes, steps))
    trains = lowered.purpose == "train"
    owned = sorted(zip(held.stage.tolist(), held.replica.tolist(), strict=True))
    return Obligations(
        purpose=lowered.purpose,
        stage_edges=layout.edges,
        splits=tuple(layout.splits.tolist()),
        sources=layout.sources or layout.unfed,
        forward=passes,
        backward=backward if trains else passes[:0],
        step=steps if trains else steps[:0],
        owners={(stage, replica): layout.stages[stage].replicas[replica] for stage, replica in owned},
        methods=methods,
    )


def _in_each_step(rows: Ints, runs: Mask) -> Ints:
    """Repeat the rows for each step that they run in; the step's number is the last column.

    `runs` has shape (rows, steps of a cycle).
    """
    steps = runs.shape[1]
    iteration = np.repeat(np.arange(steps, dtype=np.int64), len(rows))
    repeated = np.concatenate([np.tile(rows, (steps, 1)), iteration[:, None]], axis=1)
    return repeated[np.flatnonzero(runs.T.ravel())]


def _passes(layout: PipelineLayout, held: _Held) -> tuple[Ints, Ints]:
    """Return rows (stage, replica, micro-batch) of all passes, and the index of the replica of each."""
    splits, copies = layout.splits[held.stage], np.array(layout.copies, dtype=np.int64)[held.stage]
    first, each = (
        np.array(counts, dtype=np.int64)[held.path]
        for counts in (layout.first_micro_batch, layout.micro_batches)
    )
    of, within = numbered(splits * each * (layout.paths // copies))
    micro_batch = (first * splits)[of] + within
    return of, np.stack([held.stage[of], held.replica[of], micro_batch], axis=1)
