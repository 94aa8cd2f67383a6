"""The check that ranks which share a stage's gradient work on it together."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.methods.sharding.kinds import REDUCE
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import Program


def outsiders(program: Program, kind: int, where: str) -> list[Violation]:
    """Return the rows of a collective kind among other ranks than those that share the stage's gradient."""
    columns = program.columns
    shared = {
        (int(columns.rank[row]), int(columns.stage[row])): int(columns.group[row])
        for row in rows_of(program, REDUCE).tolist()
    }
    wrong = [
        row
        for row in rows_of(program, kind).tolist()
        if (group := shared.get((int(columns.rank[row]), int(columns.stage[row])))) is None
        or program.groups[group] != program.groups[int(columns.group[row])]
    ]
    return violations(
        where,
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} does not meet the ranks that share its stage",
    )
