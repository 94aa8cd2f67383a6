"""Work of every step in a program: its rows, the messages between stages, and its proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.options import NAME, OPEN, options_of, read_step_places
from weft.methods.bubble_filling.program import computations, last_issued, layout_problems
from weft.methods.bubble_filling.step_works import StepRows, StepWork, WorksInSteps
from weft.program.arrays import Ints
from weft.program.checks.obligations import check_runs
from weft.program.checks.report import find, name, violations
from weft.program.kinds import FORWARD, KINDS, STEP
from weft.program.layout import PipelineLayout
from weft.program.lower import RECEIVE_AHEAD, LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.insert import insert
from weft.program.program import NONE, Columns, Edges, Program


class PlacedRows(NamedTuple):
    """The rows of a work, and by stage, the computation behind which each piece of all of them runs."""

    rows: tuple[StepRows, ...]
    behind: tuple[tuple[int, ...], ...]


class _PlacedRow(NamedTuple):
    """A row to insert: its columns, the computation behind which it runs, and its turn there."""

    columns: dict[str, int]
    behind: int
    turn: int


# Of rows behind one computation, receives come first. A send follows its piece.
_RECEIVES, _PIECE, _SEND = -(1 << 20), 0, 1


def step_pass(work: StepWork) -> Pass[PlacedRows]:
    """Return the pass that inserts and proves a work; the method contributes both."""

    def options(plan: Plan, graph: LayerGraph) -> PlacedRows | None:
        asked = options_of(plan)
        if asked is None or work.method not in asked.works:
            return None
        behind = read_step_places(asked.steps, len(plan.stages)).get(work.method)
        if behind is None:
            return None
        rows = tuple(work.rows(plan, graph, asked))
        if {len(one) for one in behind} != {sum(one.pieces for one in rows)}:
            problem = f"{work.method}: each stage has {sum(one.pieces for one in rows)} pieces in a step"
            raise InputError(Violation(f"plan: methods: {NAME}: steps", problem, OPEN))
        return PlacedRows(rows, behind)

    return Pass(
        name=work.method,
        options=options,
        apply=insert_rows,
        last=True,
        refuse=lambda layout, placed, others: _problems(layout, told=NAME in others),
        owes=lambda layout, placed: WorksInSteps(rows=placed.rows),
        check=check_steps,
    )


def _problems(layout: PipelineLayout, *, told: bool) -> list[Violation]:
    """Return why the pipelines of a layout cannot do the work; `told`: other work tells what both need."""
    found = [] if told else layout_problems(layout)
    if layout.paths > 1:
        found.append(Violation(NAME, "the order has two pipelines on the same devices", "schedule 1f1b"))
    return found


def insert_rows(pipeline: LoweredPipeline, layout: PipelineLayout, placed: PlacedRows) -> LoweredPipeline:
    """Add the rows of a work, and the messages between its stages, to the pipeline of one step.

    Raises:
        InputError: if a device has fewer computations than a place names.
    """
    columns, stages = pipeline.columns, len(layout.stages)
    forwards = np.flatnonzero(columns.kind == FORWARD)
    device = np.zeros(stages, dtype=np.int64)
    device[columns.stage[forwards]] = columns.rank[forwards]
    found: list[_PlacedRow] = []
    edges: list[tuple[int, int]] = []
    first = 0
    for one in placed.rows:
        row_of: dict[tuple[int, int], int] = {}
        for piece in range(one.pieces):
            for stage in range(stages):
                row_of[stage, piece] = len(found)
                at = {"micro_batch": piece} if one.messages else {"part": piece}
                cells = {"kind": one.kind, "stage": stage, "replica": 0, "rank": int(device[stage]), **at}
                turn = 2 * len(found) + _PIECE
                found.append(_PlacedRow(cells, placed.behind[stage][first + piece], turn))
        if one.messages is not None:
            _add_messages(found, edges, one, row_of, layout, device)
        first += one.pieces
    return _inserted(pipeline, found, edges)


def _add_messages(
    found: list[_PlacedRow],
    edges: list[tuple[int, int]],
    rows: StepRows,
    row_of: dict[tuple[int, int], int],
    layout: PipelineLayout,
    device: Ints,
) -> None:
    """Append sends and receives between stages on different devices, and the edges from piece to piece."""
    assert rows.messages is not None, "its pieces go through all stages"
    channels: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for piece in range(rows.pieces):
        for producer, consumer in layout.edges:
            source, target = row_of[producer, piece], row_of[consumer, piece]
            ends = int(device[producer]), int(device[consumer])
            if ends[0] == ends[1]:
                edges.append((source, target))
            else:
                channels.setdefault(ends, []).append((source, target, producer, consumer))
    for (here, there), messages in channels.items():
        # Both ends keep one order: a receive is issued early, but not behind a later one.
        messages.sort(key=lambda one: (found[one[0]].behind, found[one[0]].turn, one[3]))
        ahead = [max(found[target].behind - RECEIVE_AHEAD + 1, NONE) for _, target, _, _ in messages]
        ahead = np.minimum.accumulate(ahead[::-1])[::-1].tolist()
        for behind, (source, target, producer, consumer) in zip(ahead, messages, strict=True):
            made, number = found[source], found[source].columns["micro_batch"]
            size = layout.message_bytes[producer, consumer]
            shared = {"replica": 0, "micro_batch": number, "bytes": size, "most_bytes": size}
            sent = {"kind": rows.messages.send, "stage": producer, "part": consumer, "rank": here}
            taken = {"kind": rows.messages.receive, "stage": consumer, "part": producer, "rank": there}
            send, receive = len(found), len(found) + 1
            found.append(_PlacedRow({**sent, "peer": there, **shared}, made.behind, made.turn + _SEND))
            found.append(_PlacedRow({**taken, "peer": here, **shared}, behind, _RECEIVES + receive))
            edges += [(source, send), (send, receive), (receive, target)]


def _inserted(
    pipeline: LoweredPipeline, found: list[_PlacedRow], edges: list[tuple[int, int]]
) -> LoweredPipeline:
    columns, present = pipeline.columns, len(pipeline.columns)
    names = sorted({name for one in found for name in one.columns})
    default = {"part": 0, "bytes": 0, "most_bytes": 0}
    table = {name: [one.columns.get(name, default.get(name, NONE)) for one in found] for name in names}
    added = Columns.of(len(found), **table)
    behind = np.array([one.behind for one in found], dtype=np.int64)
    turn = np.array([one.turn for one in found], dtype=np.int64)
    anchor = np.zeros(len(found), dtype=np.int64)
    for rank in np.unique(added.rank).tolist():
        own = np.flatnonzero(added.rank == rank)
        places, _ = computations(columns, rank)
        if (beyond := own[(behind[own] >= len(places)) | (behind[own] < NONE)]).size:
            problem = (
                f"stage {added.stage[beyond[0]]}: behind computation {behind[beyond[0]]} of {len(places)}"
            )
            raise InputError(Violation(f"plan: methods: {NAME}: steps", problem, OPEN))
        anchors = places[np.maximum(behind[own], 0)]
        anchor[own] = np.where(behind[own] < 0, anchors, last_issued(columns, anchors))
    # Before the first computation, turns are negative.
    order = np.argsort(np.argsort(turn, kind="stable"), kind="stable") + 1
    turns = np.where(behind < 0, order - len(found) - 1, order)
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2) + present
    return insert(pipeline, added, anchor, turns, Edges.of(pairs[:, 0], pairs[:, 1]))


def check_steps(program: Program, owed: WorksInSteps | None) -> list[Violation]:
    """Return the violations of a work of every step; values prove the messages between its stages.

    Each stage does each piece once in every step, in the order of its rows. Pieces that see the weights of
    the last step come before the stage's next one.
    """
    if owed is None:
        return []
    found: list[Violation] = []
    for one in owed.rows:
        found += check_runs(program, KINDS[one.kind].words, _owed_rows(program, one), one.kind)
    return found or list(_disorder(program, owed))


def _owed_rows(program: Program, rows: StepRows) -> Ints:
    """Return the rows (stage, replica, micro-batch, iteration) of all pieces in every step."""
    owed = program.obligations.forward
    runs, which = np.unique(owed[:, [0, 1, 3]], axis=0, return_inverse=True)
    number = np.full(len(runs) * rows.pieces, NONE, dtype=np.int64)
    if rows.messages is not None:
        # Pieces count from the first micro-batch of their replica.
        first = np.full(len(runs), np.iinfo(np.int64).max)
        np.minimum.at(first, which.reshape(-1), owed[:, 2])
        number = (first[:, None] + np.arange(rows.pieces)).ravel()
    return np.insert(np.repeat(runs, rows.pieces, axis=0), 2, number, axis=1)


def _disorder(program: Program, owed: WorksInSteps) -> Iterator[Violation]:
    """Yield rows that come before those that they follow, or behind their stage's step."""
    columns = program.columns
    kinds = np.concatenate([np.full(one.pieces, one.kind) for one in owed.rows])
    piece = np.concatenate([np.arange(one.pieces) for one in owed.rows])
    chained, early = (
        np.concatenate([np.full(one.pieces, value) for one, value in zip(owed.rows, values, strict=True)])
        for values in (
            [one.messages is not None for one in owed.rows],
            [one.before_step for one in owed.rows],
        )
    )
    rows = np.flatnonzero(np.isin(columns.kind, kinds))
    lane = columns.stage, columns.replica, columns.rank, columns.iteration
    # One line for each rank, stage and step, in the order of the device.
    table = rows[np.lexsort((rows, *(one[rows] for one in lane[::-1])))].reshape(-1, len(kinds))
    numbers = np.where(chained, columns.micro_batch[table], columns.part[table])
    first = np.where(chained, numbers.min(axis=1, where=chained, initial=np.iinfo(np.int64).max)[:, None], 0)
    wrong = (columns.kind[table] != kinds) | (numbers != first + piece)
    yield from violations("bubbles", table[wrong], lambda row: f"{name(program, row)} is not in its turn")
    steps = np.flatnonzero(columns.kind == STEP)
    lanes = tuple(tuple(one[rows] for one in lane) for rows in (steps, table[:, 0]))
    ends = np.append(steps, len(program))[find(*lanes)]
    late = early & (table > ends[:, None])
    yield from violations(
        "bubbles", table[late], lambda row: f"{name(program, row)} comes behind the step of its stage"
    )
