"""The checks that all tensor ranks of a replica, in their order, exchange at its borders."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.methods.tensor_collectives.kinds import TENSOR_BACKWARD, TENSOR_FORWARD, ExchangesBetweenSegments
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import Program

_WHERE = "tensor collectives"


def check_exchanges(program: Program, owed: ExchangesBetweenSegments | None) -> list[Violation]:
    """Return the collectives with another group or size than the stages' layers need.

    The values of segments already fix the place of each collective, and that it runs once.
    """
    if owed is None:
        return []
    return [*_check_sizes(program, owed), *_check_members(program, owed)]


def _check_sizes(program: Program, owed: ExchangesBetweenSegments) -> list[Violation]:
    columns, wrong = program.columns, []
    for row in rows_of(program, TENSOR_FORWARD, TENSOR_BACKWARD).tolist():
        stage = owed.segments[columns.stage[row]]
        borders = stage.forward if columns.kind[row] == TENSOR_FORWARD else stage.backward
        part, sizes = int(columns.part[row]), (int(columns.bytes[row]), int(columns.most_bytes[row]))
        if 0 <= part < len(borders) and sizes != (borders[part].bytes, borders[part].most_bytes):
            wrong.append(row)
    return violations(
        _WHERE,
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} has {columns.bytes[row]} bytes, its border another amount",
    )


def _check_members(program: Program, owed: ExchangesBetweenSegments) -> list[Violation]:
    # If one lane stands for all, the owners of a stage are not all of its ranks.
    if program.kept_lane is not None:
        return []
    columns, wrong = program.columns, []
    expected: dict[tuple[int, int, int], tuple[int, ...]] = {
        (stage, replica, rank): group
        for (stage, replica), ranks in program.obligations.owners.items()
        for group in owed.grids[stage].tensor_groups(ranks)
        for rank in group
    }
    for row in rows_of(program, TENSOR_FORWARD, TENSOR_BACKWARD).tolist():
        place = int(columns.stage[row]), int(columns.replica[row]), int(columns.rank[row])
        group = int(columns.group[row])
        if not 0 <= group < len(program.groups) or program.groups[group] != expected.get(place):
            wrong.append(row)
    return violations(
        _WHERE,
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} is not with the tensor ranks of its replica, in their order",
    )
