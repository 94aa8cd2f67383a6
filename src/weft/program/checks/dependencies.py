"""Every value an instruction reads is made before: by a neighbour on the same rank or by a message."""

from __future__ import annotations

from functools import partial

import numpy as np

from weft.errors import Violation
from weft.program.checks.report import EdgeSet, find, name, rows_of, violations
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
)
from weft.program.program import Ints, Program


def check_dependencies(program: Program) -> list[Violation]:
    edges = EdgeSet(program)
    stage_edges = np.array(program.obligations.stage_edges, dtype=np.int64).reshape(-1, 2)
    backward = (BACKWARD, BACKWARD_INPUT)
    found = [
        *_check_inputs(program, edges, (FORWARD,), stage_edges[:, ::-1], RECEIVE_ACTIVATION, "output"),
        *_check_inputs(program, edges, backward, stage_edges, RECEIVE_GRADIENT, "input gradient"),
        *_check_same_stage(program, edges, backward, (FORWARD,), "forward"),
        *_check_same_stage(program, edges, (BACKWARD_WEIGHT,), (BACKWARD_INPUT,), "input part"),
        *_check_same_stage(program, edges, (SEND_ACTIVATION,), (FORWARD,), "forward"),
        *_check_same_stage(program, edges, (SEND_GRADIENT,), backward, "backward"),
    ]
    return found + _check_gradients(program, edges) + _check_steps(program, edges)


def _coordinates(program: Program, rows: Ints) -> tuple[Ints, ...]:
    columns = program.columns
    return (
        columns.stage[rows],
        columns.micro_batch[rows],
        columns.iteration[rows],
        columns.replica[rows],
        columns.rank[rows],
    )


def _check_same_stage(
    program: Program, edges: EdgeSet, users: tuple[int, ...], makers: tuple[int, ...], what: str
) -> list[Violation]:
    """Each user has an edge from the maker of the same stage and micro-batch on its rank."""
    rows, sources = rows_of(program, *users), rows_of(program, *makers)
    place = find(_coordinates(program, sources), _coordinates(program, rows))
    source = np.append(sources, -1)[place]
    return violations(
        "dependencies",
        rows[~edges.has(source, rows)],
        lambda row: f"{name(program, row)} does not wait for the {what} of its stage and micro-batch",
    )


def _check_inputs(
    program: Program, edges: EdgeSet, kinds: tuple[int, ...], links: Ints, receive: int, what: str
) -> list[Violation]:
    """Each instruction of `kinds` has its neighbours' values, and nothing else is sent for them.

    `links` are pairs (stage, neighbour).
    """
    rows = rows_of(program, *kinds)
    columns = program.columns
    # One query per instruction and neighbour of its stage.
    links = links[np.argsort(links[:, 0], kind="stable")]
    first = np.searchsorted(links[:, 0], columns.stage[rows], side="left")
    count = np.searchsorted(links[:, 0], columns.stage[rows], side="right") - first
    target = np.repeat(rows, count)
    step = np.arange(len(target), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    neighbour = links[np.repeat(first, count) + step, 1]

    stage, micro_batch, iteration, replica, rank = _coordinates(program, target)
    local = find(_coordinates(program, rows), (neighbour, micro_batch, iteration, replica, rank))
    here = edges.has(np.append(rows, -1)[local], target)
    receives = rows_of(program, receive)
    arrived = find(
        (*_coordinates(program, receives), columns.part[receives]),
        (stage, micro_batch, iteration, replica, rank, neighbour),
    )
    there = edges.has(np.append(receives, -1)[arrived], target)
    unread = np.ones(len(receives), dtype=np.bool_)
    unread[arrived[arrived != -1]] = False
    found = violations(
        "dependencies",
        np.flatnonzero(~(here | there)),
        lambda place: (
            f"{name(program, target[place])} does not wait for the {what} of stage {neighbour[place]}"
        ),
    )
    return found + violations(
        "dependencies", receives[unread], lambda row: f"{name(program, row)} brings what nobody reads"
    )


def _owner_of(program: Program, rows: Ints) -> tuple[Ints, ...]:
    columns = program.columns
    return columns.stage[rows], columns.iteration[rows], columns.replica[rows], columns.rank[rows]


def _check_gradients(program: Program, edges: EdgeSet) -> list[Violation]:
    """Each weight gradient reaches the reduction of its stage, or its step where nothing is reduced."""
    makers = rows_of(program, BACKWARD, BACKWARD_WEIGHT)
    reduce = KINDS.code("reduce")
    reduces, steps = rows_of(program, reduce), rows_of(program, STEP)
    reduced = find(_owner_of(program, reduces), _owner_of(program, makers)) != -1
    empty = find(_owner_of(program, makers), _owner_of(program, reduces)) == -1
    found = violations(
        "dependencies", reduces[empty], lambda row: f"{name(program, row)} has no gradient of its stage"
    )
    for kind, selected in ((reduce, makers[reduced]), (STEP, makers[~reduced])):
        # A reduction may come in parts; one that waits for the gradient is enough.
        reached = np.zeros(len(program), dtype=np.bool_)
        mine = program.columns.kind[program.edges.target] == kind
        mine &= program.edges.distance == 0
        source, target = program.edges.source[mine], program.edges.target[mine]
        ends = zip(_owner_of(program, source), _owner_of(program, target), strict=True)
        same = np.all([maker == sink for maker, sink in ends], axis=0)
        reached[source[same]] = True
        found += violations(
            "dependencies",
            selected[~reached[selected]],
            partial(_unreached, program, KINDS[kind].name),
        )
    place = find(_owner_of(program, steps), _owner_of(program, reduces))
    step = np.append(steps, -1)[place]
    found += violations(
        "dependencies",
        np.flatnonzero((step != -1) & ~edges.has(reduces, step)),
        lambda index: f"{name(program, step[index])} does not wait for {name(program, reduces[index])}",
    )
    return found


def _unreached(program: Program, sink: str, row: int) -> str:
    return f"the {sink} of its stage does not wait for {name(program, row)}"


def _check_steps(program: Program, edges: EdgeSet) -> list[Violation]:
    """A forward reads the weights of the step before: by an edge, or because one queue runs both in order."""
    steps, forwards = rows_of(program, STEP), rows_of(program, FORWARD)
    forwards = forwards[program.columns.iteration[forwards] >= 0]
    stage, iteration, replica, rank = _owner_of(program, forwards)
    before = (iteration - 1) % program.steps_per_cycle
    distance = (iteration == 0).astype(np.int64)
    place = find(_owner_of(program, steps), (stage, before, replica, rank))
    step = np.append(steps, -1)[place]
    same_queue = (program.queue[step] == program.queue[forwards]) & ((distance == 1) | (step < forwards))
    waits = (step == -1) | same_queue | edges.has(step, forwards, distance)
    return violations(
        "dependencies",
        forwards[~waits],
        lambda row: f"{name(program, row)} does not wait for the optimizer step before it",
    )
