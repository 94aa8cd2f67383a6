"""The law of messages: both ends of every message agree, and all members of every collective."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.program.arrays import Ints
from weft.program.checks.report import find, name, rows_of, violations
from weft.program.codes import codes
from weft.program.kinds import KINDS, is_collective, message_kinds
from weft.program.program import NONE, Program


def matched(program: Program, send: int, receive: int) -> tuple[Ints, Ints]:
    """Return the rows of all sends of a kind, and of their receives (-1 for none)."""
    sends, receives = rows_of(program, send), rows_of(program, receive)
    place = find(_ends(program, receives, mirrored=True), _ends(program, sends, mirrored=False))
    return sends, np.append(receives, -1)[place]


def _ends(program: Program, rows: Ints, *, mirrored: bool) -> tuple[Ints, ...]:
    """Return columns (from rank, to rank, from stage, to stage, micro-batch, iteration) of messages."""
    columns = program.columns
    ranks = (columns.rank[rows], columns.peer[rows])
    stages = (columns.stage[rows], columns.part[rows])
    if mirrored:
        ranks, stages = ranks[::-1], stages[::-1]
    return (*ranks, *stages, columns.micro_batch[rows], columns.iteration[rows])


def check_messages(program: Program) -> list[Violation]:
    """Check the bytes and the order of every message with both ends."""
    found = []
    for send, receive in message_kinds():
        sends, receives = matched(program, send, receive)
        found += _check_pairs(program, sends[receives != -1], receives[receives != -1])
    return found


def _check_pairs(program: Program, sends: Ints, receives: Ints) -> list[Violation]:
    """Check that matched ends agree on the bytes, and come in the same order in their channel."""
    columns = program.columns
    found = violations(
        "messages",
        np.flatnonzero(columns.bytes[sends] != columns.bytes[receives]),
        lambda place: (
            f"{name(program, sends[place])} has {columns.bytes[sends[place]]} bytes, "
            f"its receive {columns.bytes[receives[place]]}"
        ),
    )
    if not len(sends):
        return found
    channel = codes(columns.rank[sends], columns.rank[receives])
    order = np.lexsort((sends, channel))
    overtakes = (np.diff(receives[order]) < 0) & (np.diff(channel[order]) == 0)
    return found + violations(
        "messages",
        order[1:][overtakes],
        lambda place: (
            f"{name(program, sends[place])} and {name(program, receives[place])} have different places "
            "in the first-in-first-out order of their channel"
        ),
    )


def check_collectives(program: Program) -> list[Violation]:
    """Check that every rank of a group takes part exactly once and with the same bytes as the others.

    A folded program has the members of one replica only; there, missing members are legal.
    """
    columns = program.columns
    rows = np.flatnonzero(is_collective(columns.kind))
    rows = rows[columns.group[rows] != NONE]
    if not len(rows):
        return []
    _, call = np.unique(collective_codes(program, rows), return_inverse=True)
    first = np.full(int(call.max()) + 1, len(program), dtype=np.int64)
    np.minimum.at(first, call, rows)

    member = codes(call, columns.rank[rows])
    order = np.argsort(member, kind="stable")
    again = rows[order[1:][np.diff(member[order]) == 0]]
    found = violations("collectives", again, lambda row: f"{name(program, row)} takes part twice")
    found += violations(
        "collectives",
        rows[columns.bytes[rows] != columns.bytes[first[call]]],
        lambda row: (
            f"{name(program, row)} has {columns.bytes[row]} bytes, "
            f"{name(program, first[call[np.searchsorted(rows, row)]])} another amount"
        ),
    )
    if program.kept_replica is not None:
        return found
    present = np.bincount(call[np.unique(member, return_index=True)[1]])
    # If lanes are folded, only ranks of the kept lane take part.
    there = {rank for ranks in program.obligations.owners.values() for rank in ranks}
    kept = [group if program.kept_lane is None else there.intersection(group) for group in program.groups]
    sizes = np.array([len(set(group)) for group in kept], dtype=np.int64)
    return found + violations(
        "collectives",
        first[present != sizes[columns.group[first]]],
        lambda row: (
            f"not all ranks of {list(program.groups[columns.group[row]])} take part in {name(program, row)}"
        ),
    )


def collective_codes(program: Program, rows: Ints) -> Ints:
    """Return equal codes for members of one collective: same kind, step, micro-batch, group and part.

    Members have the same stage, too, unless the kind spans stages.
    """
    columns = program.columns
    spans = np.array([kind.spans_stages for kind in KINDS])[columns.kind[rows]]
    return codes(
        columns.kind[rows],
        np.where(spans, NONE, columns.stage[rows]),
        columns.iteration[rows],
        columns.micro_batch[rows],
        columns.group[rows],
        columns.part[rows],
    )
