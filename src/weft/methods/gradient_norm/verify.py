"""The norm of the whole gradient: of what is reduced, on every rank that steps, before it steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.errors import Violation
from weft.methods.gradient_norm.kinds import NORM
from weft.program.checks.report import EdgeSet, find, name, rows_of, violations
from weft.program.kinds import MAKES_GRADIENTS, STEP, kinds_writing
from weft.program.program import Ints, Owed, Program


@dataclass(frozen=True, kw_only=True)
class TakesNorm(Owed):
    """Every step waits for the norm of the whole gradient."""


def check_norm(program: Program, owed: TakesNorm | None) -> list[Violation]:
    """Everything that keeps steps from waiting for the norm, and norms that nobody owes."""
    edges, norms = EdgeSet(program), rows_of(program, NORM)
    if owed is None:
        return violations("norm", norms, lambda row: f"{name(program, row)} takes a norm that nobody owes")
    steps, place = rows_of(program, STEP), _place(program, norms)
    norm_of_step = np.append(norms, -1)[find(place, _place(program, steps))]
    found = violations(
        "norm",
        steps[~edges.has(norm_of_step, steps)],
        lambda row: f"{name(program, row)} does not wait for the norm of the gradient",
    )
    awaited = np.concatenate([rows_of(program, *kinds_writing("reduced_gradient")), _last_makers(program)])
    norm = np.append(norms, -1)[find(place, _place(program, awaited))]
    return found + violations(
        "norm",
        awaited[~edges.has(awaited, norm)],
        lambda row: f"no norm of the gradient waits for {name(program, row)}",
    )


def _last_makers(program: Program) -> Ints:
    """The last instruction of every rank and step that makes gradients; its computations come in order."""
    rows = rows_of(program, *MAKES_GRADIENTS)
    rank, iteration = _place(program, rows)
    order = np.lexsort((rows, iteration, rank))
    rank, iteration = rank[order], iteration[order]
    ends = np.append((np.diff(rank) != 0) | (np.diff(iteration) != 0), True)[: len(rows)]
    last: Ints = rows[order][ends]
    return last


def _place(program: Program, rows: Ints) -> tuple[Ints, ...]:
    return program.columns.rank[rows], program.columns.iteration[rows]
