"""The check that the ranks that share a stage complete its matrices together.

The values of `kinds` prove that every exchange runs once, and before the step.
"""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.methods.sharding.kinds import REDUCE
from weft.methods.whole_matrices.kinds import WHOLE_MATRICES, CompletesMatrices
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import Program


def check_exchanges(program: Program, owed: CompletesMatrices | None) -> list[Violation]:
    """Return the exchanges among other ranks than those that share the stage's gradient."""
    if owed is None:
        return []
    columns = program.columns
    shared = {
        (int(columns.rank[row]), int(columns.stage[row])): int(columns.group[row])
        for row in rows_of(program, REDUCE).tolist()
    }
    wrong = [
        row
        for row in rows_of(program, WHOLE_MATRICES).tolist()
        if (group := shared.get((int(columns.rank[row]), int(columns.stage[row])))) is None
        or program.groups[group] != program.groups[int(columns.group[row])]
    ]
    return violations(
        "whole matrices",
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} does not meet the ranks that share its stage",
    )
