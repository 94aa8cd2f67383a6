"""The checks that all replicas of each stepped stage run all its meetings together, and no others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.errors import Violation
from weft.methods.cser.kinds import RESET_ERROR, SYNCHRONISE_UPDATE, ResetsErrors
from weft.methods.local_averaging.verify import check_members
from weft.program.checks.obligations import check_runs
from weft.program.program import Program


def check_resets(program: Program, owed: ResetsErrors | None) -> list[Violation]:
    """Return the violations by which a part of an update or an error would never be averaged."""
    if owed is None:
        return []
    if owed.every and program.steps_per_cycle % owed.every:
        problem = f"a cycle of {program.steps_per_cycle} steps does not end with a reset"
        return [Violation("resets", f"{problem}; they come every {owed.every} steps")]
    steps = program.obligations.step

    def runs(what: str, kind: int, after: Callable[[int], bool]) -> list[Violation]:
        chosen = np.array([after(step) for step in steps[:, 2].tolist()], dtype=bool)
        return check_runs(program, what, np.insert(steps[chosen], 2, -1, axis=1), kind)

    found = [
        *runs("updates", SYNCHRONISE_UPDATE, owed.updates_after),
        *runs("resets", RESET_ERROR, owed.resets_after),
    ]
    if program.kept_replica is not None:
        # A folded program has the rows of one replica only.
        return found
    return found + check_members(program, "meetings", SYNCHRONISE_UPDATE, RESET_ERROR)
