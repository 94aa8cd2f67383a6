"""The proof of a program that each stage does all work once in each window, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.errors import Violation
from weft.methods.bubble_filling.checks import disorder, uncounted
from weft.methods.bubble_filling.kinds import FillsBubbles
from weft.methods.bubble_filling.steps import ENDS
from weft.methods.bubble_filling.work import Busy, DeviceStep, Placed, Window
from weft.methods.bubble_filling.works import WorkRows
from weft.program.arrays import Ints
from weft.program.kinds import is_any_of
from weft.program.program import Program


def check_windows(program: Program, owed: FillsBubbles | None) -> list[Violation]:
    """Return the violations of every stage's windows; values prove what a row reads."""
    if owed is None:
        return []
    columns, found = program.columns, list[Violation]()
    for stage, (steps, items) in enumerate(zip(owed.steps, owed.items, strict=True)):
        if not items:
            continue
        if program.steps_per_cycle % steps:
            problem = f"its windows of {steps} steps do not end with a cycle of {program.steps_per_cycle}"
            found.append(Violation(f"bubbles: stage {stage}", problem))
            continue
        kinds = sorted({*ENDS, *(one.kind for one in items)})
        rows = np.flatnonzero((columns.stage == stage) & is_any_of(columns.kind, kinds))
        known: set[bytes] = set()
        for replica in np.unique(columns.replica[rows]).tolist():
            own, where = rows[columns.replica[rows] == replica], f"bubbles: stage {stage}, replica {replica}"
            sequence, *others = (
                _sequence(program, own[columns.rank[own] == rank]) for rank in np.unique(columns.rank[own])
            )
            # They exchange in this order.
            if any(one.tobytes() != sequence.tobytes() for one in others):
                found.append(Violation(where, "its tensor ranks do not run all passes and work in one order"))
            # Replicas do alike.
            if sequence.tobytes() not in known:
                known.add(sequence.tobytes())
                found += (Violation(where, one) for one in _problems(sequence, steps, items))
    return found


def _sequence(program: Program, own: Ints) -> Ints:
    """Return the kind, part, place of the micro-batch and step of rows of one rank, shape (rows, 4)."""
    columns = program.columns
    micro_batch = columns.micro_batch[own]
    numbers = np.unique(micro_batch[micro_batch >= 0])
    place = np.where(micro_batch >= 0, np.searchsorted(numbers, micro_batch), 0)
    sequence: Ints = np.stack([columns.kind[own], columns.part[own], place, columns.iteration[own]], axis=1)
    return sequence


def _problems(sequence: Ints, steps: int, items: Sequence[WorkRows]) -> Iterator[str]:
    """Yield what is wrong with the windows of a stage, in the order of its rows."""
    passes = is_any_of(sequence[:, 0], sorted(ENDS))
    count = int(sequence[passes, 2].max(initial=0)) + 1
    work = [one.as_item(0, (0.0,) * one.count(count), range(count)) for one in items]
    of = {(one.kind, one.part): item for item, one in enumerate(items)}
    in_first = sequence[passes & (sequence[:, 3] == 0)].tolist()
    busy = tuple(Busy(0.0, 0.0, ENDS[kind], 0, place) for kind, _, place, _ in in_first)
    step = DeviceStep(busy, 0.0)
    for opening in range(0, int(sequence[:, 3].max(initial=0)) + 1, steps):
        inside = (sequence[:, 3] >= opening) & (sequence[:, 3] < opening + steps)
        placed, behind, before = [], -1, -1
        for kind, part, place, iteration in sequence[inside].tolist():
            behind, before = (-1 if iteration != before else behind), iteration
            if kind in ENDS:
                behind += 1
            else:
                placed.append(
                    Placed(iteration - opening, behind, 0.0, of.get((kind, part), len(items)), place)
                )
        window = Window(steps, tuple(placed))
        wrong = list(uncounted(work, window)) or list(disorder(step, work, window))
        yield from (str(one) for one in wrong)
