"""The checks of exchanges in pieces: the values prove their order, these checks the members and the bytes."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.methods.clan.kinds import EXCHANGE, PULL, PUSH, CompressesBothWays
from weft.methods.sharding.kinds import REDUCE
from weft.program.checks.report import name, rows_of, violations
from weft.program.codes import distinct_rows
from weft.program.program import Program


def check_exchange(program: Program, owed: CompressesBothWays | None) -> list[Violation]:
    """Return the violations by which replicas would add up other pieces than their own."""
    if owed is None:
        return []
    columns = program.columns
    rows = rows_of(program, *EXCHANGE)
    pieces = np.array(owed.pieces, dtype=np.int64)[columns.stage[rows]]
    found = violations(
        "clan",
        rows[columns.part[rows] >= pieces],
        lambda row: f"{name(program, row)} is of a piece that its stage does not have",
    )
    keys = (columns.stage, columns.replica, columns.part, columns.iteration)
    first, which = distinct_rows(*(key[rows] for key in keys))
    found += violations(
        "clan",
        rows[columns.bytes[rows] != columns.bytes[rows][first][which]],
        lambda row: f"{name(program, row)} has other bytes than the rest of its piece",
    )
    members = {
        (int(columns.stage[row]), int(columns.rank[row])): sorted(program.groups[columns.group[row]])
        for row in rows_of(program, REDUCE).tolist()
    }
    wrong = [
        row
        for row in rows_of(program, PUSH, PULL).tolist()
        if sorted(program.groups[columns.group[row]])
        != members.get((int(columns.stage[row]), int(columns.rank[row])))
    ]
    return found + violations(
        "clan",
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} is not with the replicas of its reduction",
    )
