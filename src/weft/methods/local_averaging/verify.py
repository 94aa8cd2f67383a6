"""The checks that every replica averages all its stepped stages with all others, after every K-th step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from weft.errors import Violation
from weft.methods.local_averaging.kinds import AVERAGE_WEIGHTS, AveragesWeights
from weft.program.checks.obligations import check_runs
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import Program


def check_averagings(program: Program, owed: AveragesWeights | None) -> list[Violation]:
    """Return the violations that keep replicas from being equal at a cycle's end."""
    if owed is None:
        return []
    if program.steps_per_cycle % owed.every:
        problem = f"a cycle of {program.steps_per_cycle} steps does not end with an averaging"
        return [Violation("averagings", f"{problem}; they come every {owed.every} steps")]
    steps = program.obligations.step
    last = steps[(steps[:, 2] + 1) % owed.every == 0]
    found = check_runs(program, "averagings", np.insert(last, 2, -1, axis=1), AVERAGE_WEIGHTS)
    found += _check_own_steps(program, owed)
    # A folded program has the rows of one replica only.
    return (
        found
        if program.kept_replica is not None
        else found + check_members(program, "averagings", AVERAGE_WEIGHTS)
    )


def _check_own_steps(program: Program, owed: AveragesWeights) -> list[Violation]:
    """Check that every replica takes as many steps of a cycle as its own number says."""
    places, counts = np.unique(program.obligations.step[:, :2], axis=0, return_counts=True)
    cycles = program.steps_per_cycle // owed.every
    return [
        Violation(
            "averagings", f"replica {replica} takes {count} steps of stage {stage} in a cycle", str(own)
        )
        for (stage, replica), count in zip(places.tolist(), counts.tolist(), strict=True)
        if count != (own := cycles * owed.steps[replica])
    ]


def check_members(
    program: Program, what: str, *kinds: int, there: Callable[[int, int], bool] = lambda replica, step: True
) -> list[Violation]:
    """Check that all ranks with the same part of a stage run its collectives of these kinds together.

    `there` tells whether a replica takes part after a step of the cycle.
    """
    columns, owners = program.columns, program.obligations.owners
    holders: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for (stage, replica), ranks in owners.items():
        holders.setdefault(stage, []).append((replica, ranks))

    @cache
    def expected(stage: int, lane: int, step: int) -> set[int]:
        return {ranks[lane] for replica, ranks in holders.get(stage, []) if there(replica, step)}

    wrong = []
    for row in rows_of(program, *kinds).tolist():
        stage, rank = int(columns.stage[row]), int(columns.rank[row])
        own = owners.get((stage, int(columns.replica[row])), ())
        lane = own.index(rank) if rank in own else -1
        group, met = int(columns.group[row]), expected(stage, lane, int(columns.iteration[row]))
        if not 0 <= group < len(program.groups) or set(program.groups[group]) != met:
            wrong.append(row)
    return violations(
        what,
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} is not with all replicas of its stage",
    )
