"""The check that all ranks of a stage exchange its sums.

The values of `kinds` prove that every exchange runs once, in turn, and before the step.
"""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.methods.tensor_norms.kinds import TENSOR_NORMS, TakesTensorNorms
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import Program


def check_exchanges(program: Program, owed: TakesTensorNorms | None) -> list[Violation]:
    """Return the exchanges of other ranks than all that step a stage together."""
    # A folded program has some of the ranks only.
    if owed is None or program.kept_replica is not None or program.kept_lane is not None:
        return []
    columns, holders = program.columns, program.obligations.owners
    rows = rows_of(program, TENSOR_NORMS)
    wrong = []
    for row in rows.tolist():
        stage, replica = int(columns.stage[row]), int(columns.replica[row])
        together = {
            rank
            for (held, copy), ranks in holders.items()
            if held == stage and (copy == replica or not owed.local)
            for rank in ranks
        }
        if set(program.groups[int(columns.group[row])]) != together:
            wrong.append(row)
    return violations(
        "tensor norms",
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} does not add up the sums of all ranks of its stage",
    )
