"""The law of obligations: every owed forward, backward and step runs exactly once, and no other does."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.program.arrays import Ints
from weft.program.checks.report import rows_of, violations
from weft.program.codes import codes, numbered
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, STEP
from weft.program.program import Obligations, Program


def check_obligations(program: Program) -> list[Violation]:
    """Check all obligations; a backward counts as input part and weight part, and may run whole or split."""
    owed = program.obligations
    pairs = np.concatenate([table[:, :2] for table in (owed.forward, owed.backward, owed.step)])
    owned = {key for key, ranks in owed.owners.items() if ranks}
    missing = [pair for pair in np.unique(pairs, axis=0).tolist() if tuple(pair) not in owned]
    if missing:
        return [
            Violation("owners", f"stage {stage} of replica {replica} is owed but no rank owns it")
            for stage, replica in missing
        ]
    return [
        *check_runs(program, "forward", owed.forward, FORWARD),
        *check_runs(program, "backward", owed.backward, BACKWARD, BACKWARD_INPUT),
        *check_runs(program, "weight part of backward", owed.backward, BACKWARD, BACKWARD_WEIGHT),
        *check_runs(program, "step", np.insert(owed.step, 2, -1, axis=1), STEP),
    ]


def check_runs(program: Program, what: str, owed: Ints, *kinds: int) -> list[Violation]:
    """Compare owed rows (stage, replica, micro-batch, iteration) with the owners' rows of these kinds."""
    columns = program.columns
    rows = rows_of(program, *kinds)
    wanted = _per_rank(owed, program.obligations)
    present = np.stack(
        [
            getattr(columns, column)[rows]
            for column in ("stage", "replica", "micro_batch", "iteration", "rank")
        ],
        axis=1,
    )
    both = np.concatenate([wanted, present])
    code, first, inverse = np.unique(codes(*both.T), return_index=True, return_inverse=True)
    owed_count = np.bincount(inverse[: len(wanted)], minlength=len(code))
    present_count = np.bincount(inverse[len(wanted) :], minlength=len(code))

    def say(place: int) -> str:
        stage, replica, micro_batch, iteration, rank = both[first[place]].tolist()
        text = f"stage {stage}" if micro_batch < 0 else f"stage {stage}, micro-batch {micro_batch}"
        if program.steps_per_cycle > 1:
            text += f", step {iteration}"
        return (
            f"{text} of replica {replica} runs {present_count[place]} times on rank {rank}, "
            f"not {owed_count[place]}"
        )

    return violations(what, np.flatnonzero(owed_count != present_count), say)


def _per_rank(owed: Ints, obligations: Obligations) -> Ints:
    """Repeat each owed row for all ranks of its replica and append the rank, shape (rows, 5)."""
    if not len(owed):
        return np.zeros((0, 5), dtype=np.int64)
    pairs, inverse = np.unique(owed[:, :2], axis=0, return_inverse=True)
    owners = [obligations.owners[stage, replica] for stage, replica in pairs.tolist()]
    counts = np.array([len(ranks) for ranks in owners], dtype=np.int64)
    flat = np.array([rank for ranks in owners for rank in ranks], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    pair = inverse.reshape(-1)
    rows, lane = numbered(counts[pair])
    return np.concatenate([owed[rows], flat[starts[pair[rows]] + lane][:, None]], axis=1)
