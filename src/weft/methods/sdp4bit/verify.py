"""The checks of sums inside nodes: each precedes one reduction, in whole and equal parts of its group."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.methods.sdp4bit.kinds import REDUCE_BETWEEN, REDUCE_INSIDE, ReducesInside
from weft.methods.sharding.kinds import REDUCE
from weft.program.checks.report import name, rows_of, violations
from weft.program.kinds import is_any_of
from weft.program.program import Program


def check_inside(program: Program, owed: ReducesInside | None) -> list[Violation]:
    """Return the violations that would count a gradient twice, or not at all."""
    if owed is None:
        return []
    columns, edges = program.columns, program.edges
    paired = (columns.kind[edges.source] == REDUCE_INSIDE) & is_any_of(
        columns.kind[edges.target], (REDUCE, REDUCE_BETWEEN)
    )
    for field in (columns.rank, columns.stage):
        paired &= field[edges.source] == field[edges.target]
    sums = np.bincount(edges.target[paired], minlength=len(columns))
    outside = rows_of(program, REDUCE, REDUCE_BETWEEN)
    found = violations(
        "sdp4bit",
        outside[sums[outside] != 1],
        lambda row: f"{name(program, row)} must follow one sum inside its node",
    )
    reductions, between = rows_of(program, REDUCE), rows_of(program, REDUCE_BETWEEN)
    if len(between) != len(reductions) * (owed.slices - 1):
        problem = f"{len(reductions)} reductions have {len(between)} further sums between nodes"
        found.append(Violation("sdp4bit", f"{problem}; they have {owed.slices} slices each"))
    # A folded program has the rows of one replica only.
    if program.kept_replica is not None:
        return found
    ends = edges.source[paired], edges.target[paired]
    groups = (columns.group[rows].tolist() for rows in ends)
    wrong = [
        row
        for row, of_node, of_all in zip(ends[0].tolist(), *groups, strict=True)
        if not _is_part(program.groups[of_node], program.groups[of_all], owed.neighbours)
    ]
    return found + violations(
        "sdp4bit",
        np.array(wrong, dtype=np.int64),
        lambda row: f"{name(program, row)} is not with {owed.neighbours} neighbours of its reduction",
    )


def _is_part(inside: tuple[int, ...], everyone: tuple[int, ...], size: int) -> bool:
    """Return True if `inside` is one of the parts of `size` neighbours, in rank order, of `everyone`."""
    order = sorted(everyone)
    return sorted(inside) in [order[first : first + size] for first in range(0, len(order), size)]
