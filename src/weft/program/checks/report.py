"""Names of instructions, lookups of rows and readable lists of violations, for the checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weft.errors import Violation
from weft.program.arrays import Ints
from weft.program.codes import codes
from weft.program.kinds import is_any_of
from weft.program.program import NONE, Program

# A broken program often breaks one law thousands of times; the first few places are enough.
_SHOWN = 8


def name(program: Program, row: int) -> str:
    """Return a row's readable name, such as ``rank 0 F2.1`` or ``rank 0 SF2.1 to rank 1``."""
    instruction = program.instruction(int(row))
    text = f"rank {instruction.rank} {instruction}"
    if instruction.peer != NONE:
        text += f" {'to' if instruction.kind.receives is None else 'from'} rank {instruction.peer}"
    if program.steps_per_cycle > 1:
        text += f" of step {instruction.iteration}"
    return text


def violations(where: str, rows: npt.NDArray[np.integer], say: Callable[[int], str]) -> list[Violation]:
    """Return one violation per row of `rows`, the first few in full and the rest counted."""
    found = [Violation(where, say(int(row))) for row in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        found.append(Violation(where, f"and {len(rows) - _SHOWN} more of this kind"))
    return found


def find(table: tuple[Ints, ...], wanted: tuple[Ints, ...]) -> Ints:
    """Return the index in `table` of each row of `wanted` (any number of equal columns), or -1 for none."""
    size = len(table[0])
    both = codes(*(np.concatenate(pair) for pair in zip(table, wanted, strict=True)))
    known, searched = both[:size], both[size:]
    if not size:
        return np.full(len(searched), NONE, dtype=np.int64)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], searched), size - 1)
    candidate = order[place]
    return np.where(known[candidate] == searched, candidate, NONE)


def rows_of(program: Program, *kinds: int) -> Ints:
    """Return the positions of all instructions of these kinds, ascending."""
    return np.flatnonzero(is_any_of(program.columns.kind, kinds))
