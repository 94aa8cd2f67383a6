"""Copies of one weight get one gradient: every holder reduces it after making it and before stepping."""

from __future__ import annotations

from functools import partial

import numpy as np

from weft.errors import Violation
from weft.program.buffers import MAKES_GRADIENTS
from weft.program.checks.report import EdgeSet, find, name, rows_of, violations
from weft.program.kinds import REDUCE_TIED, STEP
from weft.program.program import Ints, Program


def check_tying(program: Program) -> list[Violation]:
    columns, edges = program.columns, EdgeSet(program)
    reductions = rows_of(program, REDUCE_TIED)
    tied = program.obligations.tied
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
