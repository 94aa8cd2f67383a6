"""The checks that a program offloads what it owes, and holds no more than that allows.

The values of `kinds` prove that each load follows its store, and each use its load. So every step has its
states. These checks prove which activations leave, and that a device frees memory before it takes it again.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np

from weft.errors import Violation
from weft.methods.offload.kinds import (
    LOAD_ACTIVATIONS,
    RELEASE,
    ROOM,
    STORE_ACTIVATIONS,
    Offloads,
)
from weft.program.arrays import Ints
from weft.program.checks.report import name, rows_of, violations
from weft.program.codes import codes
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTATIONS,
    FORWARD,
    is_any_of,
)
from weft.program.program import NONE, Columns, Program

# A device has the states of two stages: one is stepped, the other copied.
RESIDENT_STATES = 2
# The fewest computations from a forward to its backward pass for which its activations leave the device: they
# are stored during the first one in between and loaded during the last one.
LEAST_APART = 4


def leave(columns: Columns, rows: Ints, stages: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the places in `rows` of the forward and backward passes between which activations leave.

    `rows` are the computations of one device in one step, in order. None leave where the device would hold
    as many micro-batches as without offload.
    """
    place, key = (
        np.arange(len(rows)),
        codes(columns.stage[rows], columns.replica[rows], columns.micro_batch[rows]),
    )

    def places_of(*kinds: int) -> dict[int, int]:
        found = is_any_of(columns.kind[rows], kinds)
        return dict(zip(key[found].tolist(), place[found].tolist(), strict=True))

    begins, ends = places_of(FORWARD), places_of(BACKWARD, BACKWARD_INPUT)
    frees = places_of(BACKWARD, BACKWARD_WEIGHT)
    chosen = np.isin(columns.stage[rows], stages)
    moved = {
        one: (begins[one], end)
        for one, end in ends.items()
        if chosen[end] and end - begins[one] >= LEAST_APART
    }
    # Two points for each computation: its end, and what is freed and taken then. A forward pass takes memory
    # at its end, and the pass that frees it has it until its end.
    kept = {one: (2 * begins[one], 2 * frees[one]) for one in ends}
    left = [span for one, span in kept.items() if one not in moved]
    left += [(2 * begin, 2 * (begin + 1) + 1) for begin, _ in moved.values()]
    left += [(2 * (end - 2) + 1, 2 * frees[one]) for one, (_, end) in moved.items()]
    return list(moved.values()) if _most_at_once(left) < _most_at_once(list(kept.values())) else []


def _most_at_once(spans: list[tuple[int, int]]) -> int:
    """Return the most of these spans [first, end) that overlap."""
    change: Counter[int] = Counter()
    for first, end in spans:
        change[first] += 1
        change[end] -= 1
    return max(accumulate(change[place] for place in sorted(change)), default=0)


def check_offload(program: Program, owed: Offloads | None) -> list[Violation]:
    """Return the violations of the moves that a program owes."""
    if owed is None:
        return []
    return [*_check_activations(program, owed), *_check_room(program)]


def _check_activations(program: Program, owed: Offloads) -> list[Violation]:
    """Check that exactly those micro-batches leave whose backward passes come late enough."""
    columns, wanted = program.columns, []
    computes = is_any_of(columns.kind, COMPUTATIONS)
    for first, end in pairwise(program.rank_starts.tolist()):
        mine = first + np.flatnonzero(computes[first:end])
        for step in range(program.steps_per_cycle):
            rows = mine[columns.iteration[mine] == step]
            wanted += [int(rows[forward]) for forward, _ in leave(columns, rows, owed.activations)]
    names = ("stage", "replica", "micro_batch", "iteration", "rank")
    expected = np.stack([getattr(columns, one)[np.array(wanted, dtype=np.int64)] for one in names], axis=1)
    found = []
    for kind, what in ((STORE_ACTIVATIONS, "stores"), (LOAD_ACTIVATIONS, "loads")):
        rows = rows_of(program, kind)
        present = np.stack([getattr(columns, one)[rows] for one in names], axis=1)
        if not np.array_equal(np.unique(expected, axis=0), np.unique(present, axis=0)):
            problem = f"{len(present)} micro-batches, where {len(expected)} leave the device"
            found.append(Violation("offload", f"the program has {what} of {problem}"))
    return found


def _check_room(program: Program) -> list[Violation]:
    """Check that a device frees memory before it takes it again, and has few stages' states at a time."""
    columns = program.columns
    wrong: list[int] = []
    for first, end in pairwise(program.rank_starts.tolist()):
        mine = first + np.flatnonzero(is_any_of(columns.kind[first:end], (ROOM, RELEASE)))
        wrong += _taken_twice(columns, mine)
    return violations(
        "offload",
        np.array(sorted(wrong), dtype=np.int64),
        lambda row: f"{name(program, row)} takes or frees memory out of turn",
    )


def _taken_twice(columns: Columns, rows: Ints) -> list[int]:
    """Return the rows of one rank that take memory which is taken, or free what is not."""
    # States of the last stages are freed in the next cycle, so that two cycles show every row in turn.
    state: dict[tuple[int, int, int, int], bool] = {}
    states, wrong = set[tuple[int, int, int, int]](), []
    for cycle in range(2):
        for row in rows.tolist():
            micro_batch = int(columns.micro_batch[row])
            iteration = NONE if micro_batch == NONE else int(columns.iteration[row])
            key = (int(columns.stage[row]), int(columns.replica[row]), micro_batch, iteration)
            takes = bool(columns.kind[row] == ROOM)
            held = state.get(key)
            if micro_batch == NONE:
                (states.add if takes else states.discard)(key)
            if cycle and (held == takes or len(states) > RESIDENT_STATES):
                wrong.append(row)
            state[key] = takes
    return wrong
