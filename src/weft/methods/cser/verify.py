"""The checks that all replicas of each stepped stage run all its meetings together, and no others.

A replica that misses resets runs nothing meanwhile. It comes back by a meeting with all that are present.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.errors import Violation
from weft.methods.cser.kinds import REJOIN, RESET_ERROR, SYNCHRONISE_UPDATE, ResetsErrors
from weft.methods.local_averaging.verify import check_members
from weft.program.arrays import Ints
from weft.program.checks.obligations import check_runs
from weft.program.program import Program


def check_resets(program: Program, owed: ResetsErrors | None) -> list[Violation]:
    """Return the violations by which a part of an update or an error would never be averaged."""
    if owed is None:
        return []
    if program.steps_per_cycle % owed.cycle:
        problem = f"a cycle of {program.steps_per_cycle} steps does not end with a reset"
        return [Violation("resets", f"{problem}; they come every {owed.cycle} steps")]
    absences, steps = owed.absences, program.obligations.step
    returns = _returns(program, owed)

    def runs(what: str, kind: int, after: Callable[[int], bool], others: Ints) -> list[Violation]:
        chosen = np.array([after(step) for step in steps[:, 2].tolist()], dtype=bool)
        rows = np.concatenate([steps[chosen], others])
        return check_runs(program, what, np.insert(rows, 2, -1, axis=1), kind)

    found = [
        *_check_own_steps(program, owed),
        *runs("updates", SYNCHRONISE_UPDATE, owed.updates_after, returns[:0]),
        *runs("returns", REJOIN, lambda step: bool(absences.ended_by(step)), returns),
        *runs("resets", RESET_ERROR, owed.resets_after, returns),
    ]
    if program.kept_replica is not None:
        # A folded program has the rows of one replica only.
        return found
    found += check_members(program, "meetings", SYNCHRONISE_UPDATE, there=absences.computes)
    return found + check_members(program, "meetings", REJOIN, RESET_ERROR, there=absences.meets)


def _check_own_steps(program: Program, owed: ResetsErrors) -> list[Violation]:
    """Check that a replica takes all steps of a cycle but those of its absences."""
    steps, absences = program.obligations.step, owed.absences
    if not absences.missed:
        return []
    own: dict[int, set[int]] = {}
    for stage, replica in np.unique(steps[:, :2], axis=0).tolist():
        if replica not in own:
            cycle = range(program.steps_per_cycle)
            own[replica] = {step for step in cycle if absences.computes(replica, step)}
        taken = steps[(steps[:, 0] == stage) & (steps[:, 1] == replica), 2]
        if wrong := own[replica] ^ set(taken.tolist()):
            problem = f"replica {replica} steps stage {stage} while it is away, or rests while it is not"
            return [Violation("absences", f"{problem}, in step {min(wrong)}")]
    return []


def _returns(program: Program, owed: ResetsErrors) -> Ints:
    """Return rows (stage, replica, step) of the stages that a replica brings back by the reset of a step."""
    stepped = np.unique(program.obligations.step[:, :2], axis=0).tolist()
    found = [
        (stage, replica, step)
        for step in range(program.steps_per_cycle)
        for one in owed.absences.ended_by(step)
        for stage, replica in stepped
        if replica == one.replica
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 3)
