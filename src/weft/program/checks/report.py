"""Names of instructions, lookups of rows and readable lists of violations, for the checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weft.errors import Violation
from weft.program.arrays import Ints, Mask
from weft.program.codes import codes
from weft.program.kinds import KINDS
from weft.program.program import NONE, Program

# A broken program often breaks one law thousands of times; the first few places are enough.
_SHOWN = 8


def name(program: Program, row: int) -> str:
    """Return a row's readable name, such as ``rank 0 F2.1`` or ``rank 0 SF2.1 to rank 1``."""
    instruction = program.instruction(int(row))
    text = f"rank {instruction.rank} {instruction}"
    if instruction.peer != NONE:
        text += f" {'to' if 'message' in instruction.kind.writes else 'from'} rank {instruction.peer}"
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


class EdgeSet:
    """The edges of a program as a set, with tests of many edges at a time."""

    def __init__(self, program: Program) -> None:
        edges = program.edges
        self._rows = len(program)
        self._keys = np.sort(self._key(edges.source, edges.target, edges.distance))

    def _key(self, source: Ints, target: Ints, distance: Ints | int) -> Ints:
        return (np.asarray(distance, dtype=np.int64) * self._rows + source) * self._rows + target

    def has(self, source: Ints, target: Ints, distance: Ints | int = 0) -> Mask:
        """Return True for each edge that exists; False for a source of -1."""
        if not len(self._keys):
            return np.zeros(len(source), dtype=np.bool_)
        key = self._key(source, target, distance)
        place = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        found: Mask = (self._keys[place] == key) & (source != NONE)
        return found


def rows_of(program: Program, *kinds: int) -> Ints:
    """Return the positions of all instructions of these kinds, ascending."""
    wanted = np.zeros(len(KINDS), dtype=np.bool_)
    wanted[list(kinds)] = True
    return np.flatnonzero(wanted[program.columns.kind])
