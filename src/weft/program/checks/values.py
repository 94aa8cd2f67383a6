"""The law of values: each is made before its reads, stays whole until the last one, and is used up.

The kinds of instructions declare the values they make and read (`weft.program.values`): nothing here knows a
kind. Uses of one value at the same coordinates are followed in the order in which the host issues them. Uses
from another rank, such as receipts of messages, come after the uses from the value's own rank. Edges then
prove that this order holds for any duration of instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.errors import Violation
from weft.program.arrays import Ints, Mask
from weft.program.checks.lives import CONSUMES, WRITES, Uses, check_carried, check_lives, waits_flag
from weft.program.checks.order import Order
from weft.program.codes import codes
from weft.program.kinds import KINDS
from weft.program.places import Places
from weft.program.program import Program
from weft.program.values import VALUES, Read, ValueKind


class _Used(NamedTuple):
    """Uses of one value by one kind."""

    places: Places
    flag: int


def check_values(program: Program) -> list[Violation]:
    """Check the uses of every value that the program's kinds declare."""
    order = Order(program)
    found: list[Violation] = []
    for name, used in _used(program).items():
        value = VALUES[name]
        uses = _in_order(program, value, used)
        found += (check_carried if value.carried else check_lives)(program, order, value, uses)
    return found


def _used(program: Program) -> dict[str, list[_Used]]:
    """Return all uses, by value."""
    kinds = np.flatnonzero(np.bincount(program.columns.kind, minlength=len(KINDS))).tolist()
    rows = {code: np.flatnonzero(program.columns.kind == code) for code in kinds}
    used: dict[str, list[_Used]] = {}
    for code in kinds:
        for use in KINDS[code].all_writes:
            used.setdefault(use.value, []).append(_Used(use.at(program, rows[code]), WRITES))
    made = {name: [one.places for one in writes] for name, writes in used.items()}
    for code in kinds:
        for read in KINDS[code].all_reads:
            for choice, places in _chosen(program, read, rows[code], made):
                flag = waits_flag(choice) | (CONSUMES if choice.consumes else 0)
                used.setdefault(choice.value, []).append(_Used(places, flag))
    return used


def _chosen(
    program: Program, read: Read, rows: Ints, made: dict[str, list[Places]]
) -> list[tuple[Read, Places]]:
    """Return the places of a read, by the first of its alternatives that is made there."""
    chosen = []
    left = np.ones(0, dtype=np.bool_)
    for index, choice in enumerate(read.choices):
        places = choice.at(program, rows)
        left = np.ones(len(places.rows), dtype=np.bool_) if index == 0 else left
        if choice.otherwise is None:
            chosen.append((choice, places.take(left) if index else places))
            break
        writes = made.get(choice.value, [])
        here = left & _made_at(program, VALUES[choice.value], writes, places)
        chosen.append((choice, places.take(here)))
        left &= ~here
    return chosen


def _made_at(program: Program, value: ValueKind, writes: list[Places], places: Places) -> Mask:
    """Return True for each place where the value is made."""
    made = sum(len(one.rows) for one in writes)
    if not made:
        return np.zeros(len(places.rows), dtype=np.bool_)
    code = codes(*_coordinates(program, value, [*writes, places]).values())
    return np.isin(code[made:], code[:made])


def _coordinates(program: Program, value: ValueKind, places: list[Places]) -> dict[str, Ints]:
    """Return the columns that distinguish the values at these places."""
    names = ("rank", *value.scope) if value.carried else ("rank", *value.scope, "iteration")
    return {
        name: np.concatenate(
            [
                one.moved[name] if name in one.moved else getattr(program.columns, name)[one.rows]
                for one in places
            ]
        )
        for name in names
    }


def _in_order(program: Program, value: ValueKind, used: list[_Used]) -> Uses:
    """Return the uses sorted by coordinates and, at the same coordinates, by time."""
    columns = program.columns
    row = np.concatenate([one.places.rows for one in used])
    flag = np.repeat([one.flag for one in used], [len(one.places.rows) for one in used])
    places = _coordinates(program, value, [one.places for one in used])
    time = np.zeros(len(row), dtype=np.int64)
    if value.carried:
        time += 2 * (columns.iteration[row] + 1)
    if any("rank" in one.places.moved for one in used):
        time += places["rank"] != columns.rank[row]
    return Uses.sort(row, flag, time, places)
