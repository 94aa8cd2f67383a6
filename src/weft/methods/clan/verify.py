"""The checks of exchanges in pieces: the values prove their order, these checks the members and the bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from weft.errors import Violation
from weft.methods.clan.kinds import (
    AGGREGATE,
    EXCHANGE,
    PULL,
    PULL_FROM_SERVERS,
    PUSH,
    PUSH_TO_SERVERS,
    SERVED_EXCHANGE,
    CompressesBothWays,
)
from weft.methods.sharding.kinds import REDUCE
from weft.program.checks.report import name, rows_of, violations
from weft.program.codes import distinct_rows
from weft.program.program import Program


def check_exchange(program: Program, owed: CompressesBothWays | None) -> list[Violation]:
    """Return the violations by which replicas would add up other pieces than their own."""
    if owed is None:
        return []
    columns = program.columns
    rows = rows_of(program, *{*EXCHANGE, *SERVED_EXCHANGE})
    pieces = np.array(owed.pieces, dtype=np.int64)[columns.stage[rows]]
    found = violations(
        "clan",
        rows[columns.part[rows] >= pieces],
        lambda row: f"{name(program, row)} is of a piece that its stage does not have",
    )
    keys = (columns.stage, columns.part, columns.iteration)
    first, which = distinct_rows(*(key[rows] for key in keys))
    found += violations(
        "clan",
        rows[columns.bytes[rows] != columns.bytes[rows][first][which]],
        lambda row: f"{name(program, row)} has other bytes than the rest of its piece",
    )
    reduced = rows_of(program, REDUCE)
    # A server reduces nothing, and meets the same ranks as the replicas.
    servers = [(int(stage), rank) for stage in np.unique(columns.stage[reduced]) for rank in owed.servers]
    members = {
        (int(columns.stage[row]), int(columns.rank[row])): sorted(program.groups[columns.group[row]])
        for row in reduced.tolist()
    }
    of_stage = {stage: ranks for (stage, _), ranks in members.items()}
    members |= {(stage, rank): of_stage[stage] for stage, rank in servers}
    wrong = [
        row
        for row in rows_of(program, PUSH, PULL, PUSH_TO_SERVERS, PULL_FROM_SERVERS).tolist()
        if sorted(program.groups[columns.group[row]])
        != sorted((*members.get((int(columns.stage[row]), int(columns.rank[row])), ()), *owed.servers))
    ]
    found += violations(
        "clan",
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} is not with the replicas of its reduction and all servers",
    )
    return found + _sums(program, owed, servers)


def _sums(program: Program, owed: CompressesBothWays, servers: list[tuple[int, int]]) -> list[Violation]:
    """Return the violations by which a server adds up a piece never, or twice."""
    columns, rows = program.columns, rows_of(program, AGGREGATE)
    keys = zip(*(key[rows].tolist() for key in (columns.stage, columns.rank, columns.part)), strict=True)
    times = Counter(keys)
    return [
        Violation(
            "clan",
            f"rank {rank} adds up stage {stage}, piece {part} {times[stage, rank, part]} times in a cycle, "
            f"not {program.steps_per_cycle}",
        )
        for stage, rank in servers
        for part in range(owed.pieces[stage])
        if times[stage, rank, part] != program.steps_per_cycle
    ]
