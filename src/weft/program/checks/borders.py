"""The checks that all ranks of a replica, in their order, exchange at the borders of its segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from weft.errors import Violation
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import Program
from weft.program.segments import Border, CutInSegments


def check_borders(program: Program, owed: CutInSegments | None) -> list[Violation]:
    """Return the collectives of another kind, size or group than the borders of their stages need.

    The values of segments already fix the place of each collective, and that it runs once.
    """
    if owed is None:
        return []
    columns = program.columns

    def told(rows: Iterator[int], say: Callable[[int], str]) -> list[Violation]:
        wrong = np.array(list(rows), dtype=np.int64)
        return violations(f"{owed.axis} collectives", wrong, lambda row: f"{name(program, row)} {say(row)}")

    return [
        *told(_other_kinds(program, owed), lambda row: "is not the collective of its border"),
        *told(
            _other_sizes(program, owed),
            lambda row: f"has {columns.bytes[row]} bytes, its border another amount",
        ),
        *told(
            _other_members(program, owed),
            lambda row: f"is not with the {owed.axis} ranks of its replica, in their order",
        ),
    ]


def _borders(program: Program, owed: CutInSegments) -> Iterator[tuple[int, Border]]:
    """Yield each collective's row with its border, if there is one."""
    columns = program.columns
    backward = {one.kind for each in owed.segments for one in each.backward}
    for row in rows_of(program, *owed.kinds).tolist():
        stage = owed.segments[columns.stage[row]]
        borders = stage.backward if columns.kind[row] in backward else stage.forward
        if 0 <= (part := int(columns.part[row])) < len(borders):
            yield row, borders[part]


def _other_kinds(program: Program, owed: CutInSegments) -> Iterator[int]:
    return (row for row, border in _borders(program, owed) if program.columns.kind[row] != border.kind)


def _other_sizes(program: Program, owed: CutInSegments) -> Iterator[int]:
    columns = program.columns
    for row, border in _borders(program, owed):
        if (columns.bytes[row], columns.most_bytes[row]) != (border.bytes, border.most_bytes):
            yield row


def _other_members(program: Program, owed: CutInSegments) -> Iterator[int]:
    # If one lane stands for all, the owners of a stage are not all of its ranks.
    if program.kept_lane is not None:
        return
    columns = program.columns
    expected: dict[tuple[int, int, int], tuple[int, ...]] = {
        (stage, replica, rank): group
        for (stage, replica), ranks in program.obligations.owners.items()
        for group in owed.groups(stage, ranks)
        for rank in group
    }
    for row in rows_of(program, *owed.kinds).tolist():
        place = int(columns.stage[row]), int(columns.replica[row]), int(columns.rank[row])
        group = int(columns.group[row])
        if not 0 <= group < len(program.groups) or program.groups[group] != expected.get(place):
            yield row
