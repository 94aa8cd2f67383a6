"""Copies of one weight get one gradient: every holder reduces it after making it and before stepping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from weft.errors import Violation
from weft.methods.tying.kinds import REDUCE_TIED
from weft.program.checks.report import EdgeSet, find, name, rows_of, violations
from weft.program.kinds import MAKES_GRADIENTS, STEP
from weft.program.program import Ints, Owed, Program


@dataclass(frozen=True, kw_only=True)
class TiesStages(Owed):
    """The stages that have a copy of each tied weight."""

    stages: tuple[tuple[int, ...], ...]


def check_tying(program: Program, owed: TiesStages | None) -> list[Violation]:
    """Everything that keeps copies of a weight from getting one gradient."""
    columns, edges = program.columns, EdgeSet(program)
    reductions = rows_of(program, REDUCE_TIED)
    tied = owed.stages if owed is not None else ()
    found = violations(
        "tying",
        reductions[columns.part[reductions] >= len(tied)],
        lambda row: f"{name(program, row)} reduces a weight that no stages share",
    )
    for part, stages in enumerate(tied):
        mine = reductions[columns.part[reductions] == part]
        for kinds, outgoing in ((MAKES_GRADIENTS, False), ((STEP,), True)):
            rows = rows_of(program, *kinds)
            rows = rows[np.isin(columns.stage[rows], stages)]
            place = find(_place(program, mine), _place(program, rows))
            reduction = np.append(mine, -1)[place]
            joined = edges.has(rows, reduction) if not outgoing else edges.has(reduction, rows)
            found += violations(
                "tying",
                rows[(place == -1) | ~joined],
                partial(_unjoined, program, part, outgoing),
            )
    return found


def _unjoined(program: Program, part: int, outgoing: bool, row: int) -> str:
    if outgoing:
        return f"{name(program, row)} does not wait for the reduction of tied weight {part}"
    return f"no reduction of tied weight {part} waits for {name(program, row)}"


def _place(program: Program, rows: Ints) -> tuple[Ints, ...]:
    return program.columns.rank[rows], program.columns.iteration[rows]
