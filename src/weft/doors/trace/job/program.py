"""The Program that a trace of a job implies: the instructions of a step, their groups and their edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from weft.doors.trace.job.operations import BACKWARD, FORWARD, MESSAGES, OPERATIONS, PASSES, Operations
from weft.doors.trace.job.waits import Waits, lanes_of, waits_of
from weft.program.arrays import Ints, Mask
from weft.program.kinds import all_kinds
from weft.program.program import NONE, Columns, Edges, Groups, Obligations, Program
from weft.program.schedules import all_schedules
from weft.program.schedules.base import Pipeline, paths_of, searched_options


@dataclass(frozen=True, kw_only=True)
class ImpliedProgram:
    """The program of one step of a trace; all of its steps are alike.

    Attributes:
        operation: by instruction, its operation in the first step, of which each further step has a copy.
        receive_of: by instruction, the receive of a send; -1 for all others.
    """

    operations: Operations
    program: Program
    operation: Ints
    receive_of: Ints

    @property
    def rows(self) -> Ints:
        """The operation of each instruction in each step, shape (steps, instructions)."""
        steps = np.arange(len(self.operations.steps))[:, None]
        return steps * self.operations.per_step + self.operation

    @property
    def types(self) -> Ints:
        """The type of each instruction's operation."""
        return self.operations.type[self.operation]


def implied_program(operations: Operations) -> ImpliedProgram:
    """Return the program of a trace's steps.

    Raises:
        InputError: when the messages of a rank do not match its passes.
    """
    order = np.lexsort((operations.type[: operations.per_step], operations.start_s[: operations.per_step]))
    order = order[np.argsort(operations.rank[order], kind="stable")]
    first = _numbered(operations.take(order))
    waits = waits_of(first)
    kept = (waits.fed != NONE) | ~np.isin(first.type, MESSAGES)
    place = np.cumsum(kept) - 1
    source, target = np.array(waits.links, dtype=np.int64).reshape(-1, 2).T
    both = kept[source] & kept[target]
    paired = np.where(waits.receive_of == NONE, NONE, place[waits.receive_of])
    program = _program(first, waits, kept)
    edges = Edges.of(place[source[both]], place[target[both]])
    return ImpliedProgram(
        operations=operations,
        program=replace(program, edges=edges, schedule=_schedule(operations, program)),
        operation=order[kept],
        receive_of=paired[kept],
    )


def _numbered(first: Operations) -> Operations:
    """Return a step whose passes have micro-batches; without any in the trace, they follow the order."""
    passes = np.isin(first.type, PASSES)
    if (first.micro_batch[passes] != NONE).all():
        return first
    micro_batch = first.micro_batch.copy()
    seen: dict[tuple[int, int, int], int] = {}
    for row in np.flatnonzero(passes).tolist():
        key = int(first.rank[row]), int(first.type[row]), int(first.chunk[row])
        micro_batch[row] = seen[key] = seen.get(key, NONE) + 1
    return replace(first, micro_batch=micro_batch)


def _program(first: Operations, waits: Waits, kept: Mask) -> Program:
    """Return the instructions of a step with their groups, without edges."""
    kinds = np.array([all_kinds().code(one.kind) for one in OPERATIONS])
    groups, group = _groups(first)
    fed, receive_of = waits.fed, waits.receive_of
    message = fed != NONE
    made = np.where(message, fed, np.arange(len(first)))
    of_micro_batches = message | np.isin(first.type, PASSES)
    peer = np.full(len(first), NONE)
    sends = np.flatnonzero(receive_of != NONE)
    peer[sends] = first.rank[receive_of[sends]]
    peer[receive_of[sends]] = first.rank[sends]
    columns = Columns.of(
        len(first),
        kind=kinds[first.type],
        stage=np.where(of_micro_batches, first.model_stage[made], first.stage),
        micro_batch=np.where(of_micro_batches, first.micro_batch[made], NONE),
        rank=first.rank,
        replica=first.replica,
        part=np.where(message, waits.peer_stage, np.where(of_micro_batches, 0, first.sequence)),
        peer=peer,
        group=group,
    ).take(np.flatnonzero(kept))
    owners: dict[tuple[int, int], tuple[int, ...]] = {}
    passes = np.isin(first.type, PASSES)
    held = np.stack([first.model_stage, first.replica, first.rank], axis=1)[passes]
    for stage, replica, rank in np.unique(held, axis=0).tolist():
        owners[stage, replica] = (*owners.get((stage, replica), ()), rank)
    stages = first.stages * first.chunks
    nothing = np.empty((0, 3), dtype=np.int64)
    obligations = Obligations(
        purpose="custom",
        stage_edges=tuple(pairwise(range(stages))),
        forward=_done(first, FORWARD),
        backward=_done(first, BACKWARD),
        step=nothing,
        owners=owners,
    )
    return Program(
        ranks=first.ranks,
        steps_per_cycle=1,
        columns=columns,
        edges=Edges.of([], []),
        groups=groups,
        obligations=obligations,
    )


def _done(first: Operations, kind: int) -> Ints:
    rows = first.type == kind
    done = np.stack([first.model_stage, first.replica, first.micro_batch, np.zeros(len(first))], axis=1)
    return np.unique(done[rows].astype(np.int64), axis=0)


def _groups(first: Operations) -> tuple[Groups, Ints]:
    """Return the groups of a step's collectives, and the group of each row."""
    lane, ends = lanes_of(first), np.isin(first.stage, (0, first.stages - 1))
    numbers: dict[tuple[int, ...], int] = {}
    group = np.full(len(first), NONE)
    meets: Mapping[int, str] = {index: one.meets for index, one in enumerate(OPERATIONS) if one.meets}
    members: dict[tuple[int, ...], set[int]] = {}
    for row in np.flatnonzero(np.isin(first.type, list(meets))).tolist():
        kind, place = int(first.type[row]), (int(first.stage[row]), int(first.replica[row]), int(lane[row]))
        if meets[kind] == "ends" and not ends[row]:
            continue
        key = {
            "replicas": (0, place[0], place[2]),
            "ends": (1, place[1], place[2]),
            "all": (2,),
        }[meets[kind]]
        group[row] = numbers.setdefault(key, len(numbers))
        members.setdefault(key, set()).add(int(first.rank[row]))
    return tuple(tuple(sorted(members[key])) for key in numbers), group


def _schedule(operations: Operations, program: Program) -> str:
    """Return the name of the schedule that orders the passes like this; empty where none does."""
    columns = program.columns
    kinds = [all_kinds().code(OPERATIONS[one].kind) for one in PASSES]
    stages, micro_batches = operations.stages * operations.chunks, int(columns.micro_batch.max()) + 1
    pipeline = Pipeline(operations.stages, stages, micro_batches)
    # One of a stage's ranks stands for all.
    ranks = {min(held) for (_, replica), held in program.obligations.owners.items() if replica == 0}
    rows = np.flatnonzero(np.isin(columns.kind, kinds) & np.isin(columns.rank, list(ranks)))
    done = np.stack([columns.kind, columns.stage, columns.micro_batch], axis=1)
    device = columns.stage[rows] % operations.stages
    for name, schedule in all_schedules().items():
        if paths_of(schedule) > 1:
            continue
        for options in searched_options(schedule):
            if schedule.refuse(pipeline, options) is not None:
                continue
            orders = [schedule.order(pipeline, one, options) for one in range(operations.stages)]
            if all(
                np.array_equal(np.stack(order, axis=1), done[rows[device == one]])
                for one, order in enumerate(orders)
            ):
                return name
    return ""
