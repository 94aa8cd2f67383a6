"""Replicas that share out states keep to their buffers.

A gather takes the room of exactly one free, and no more stages accumulate gradients at once than there are
buffers for them. Islands add up what they reduce (`weft.methods.sharding.verify_islands`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.errors import Violation
from weft.methods.sharding.kinds import FREE, GATHER, REDUCE
from weft.methods.sharding.owed import SharesOut
from weft.methods.sharding.verify_islands import check_islands
from weft.program.buffers import SHARDED_BUFFERS
from weft.program.checks.report import name, rows_of, violations
from weft.program.kinds import COMPUTATIONS, MAKES_GRADIENTS
from weft.program.program import Program


def check_sharding(program: Program, owed: SharesOut | None) -> list[Violation]:
    """Everything that keeps replicas from sharing out what they should."""
    if owed is None:
        return []
    found = _check_room(program) if owed.level == "zero-3" else []
    if owed.level in ("zero-2", "zero-3"):
        found += _check_gradient_buffers(program)
    return found + check_islands(program, owed.islands)


def _check_room(program: Program) -> list[Violation]:
    """Frees and gathers of a rank are matched one to one, so that as many stages are resident at any time."""
    columns, edges = program.columns, program.edges
    hands_over = (columns.kind[edges.source] == FREE) & (columns.kind[edges.target] == GATHER)
    hands_over &= columns.rank[edges.source] == columns.rank[edges.target]
    given = np.bincount(edges.source[hands_over], minlength=len(columns))
    taken = np.bincount(edges.target[hands_over], minlength=len(columns))
    buffers = np.bincount(columns.rank[edges.source[hands_over & (edges.distance > 0)]])
    found = violations(
        "sharding",
        rows_of(program, FREE)[given[rows_of(program, FREE)] != 1],
        lambda row: f"{name(program, row)} must make room for exactly one gather",
    )
    found += violations(
        "sharding",
        rows_of(program, GATHER)[taken[rows_of(program, GATHER)] != 1],
        lambda row: f"{name(program, row)} must wait for the room of exactly one free",
    )
    return found + violations(
        "sharding",
        np.flatnonzero(buffers > SHARDED_BUFFERS),
        lambda rank: f"rank {rank} gathers into {buffers[rank]} buffers; it has {SHARDED_BUFFERS}",
    )


def _check_gradient_buffers(program: Program) -> list[Violation]:
    """A gradient takes a buffer from its first maker until the computation that waits for its reduction."""
    columns, edges = program.columns, program.edges
    now, kind = edges.distance == 0, columns.kind
    made = now & np.isin(kind[edges.source], MAKES_GRADIENTS) & (kind[edges.target] == REDUCE)
    awaited = now & (kind[edges.source] == REDUCE) & np.isin(kind[edges.target], COMPUTATIONS)
    reduces = rows_of(program, REDUCE)
    begin = np.full(len(columns), len(columns), dtype=np.int64)
    np.minimum.at(begin, edges.target[made], edges.source[made])
    end = program.rank_starts[columns.rank + 1]
    np.minimum.at(end, edges.source[awaited], edges.target[awaited])
    begin, end = begin[reduces], end[reduces]
    change = np.concatenate([np.ones(len(reduces), np.int64), -np.ones(len(reduces), np.int64)])
    at = np.concatenate([begin, end])
    # At one place a buffer is given back before it is taken; the ends of ranks give back all.
    order = np.lexsort((change, at))
    taken: npt.NDArray[np.int64] = np.cumsum(change[order])
    over = order[(taken > SHARDED_BUFFERS) & (change[order] > 0)]
    return violations(
        "sharding",
        np.sort(reduces[over]),
        lambda row: (
            f"the gradient of {name(program, row)} finds all {SHARDED_BUFFERS} buffers taken; "
            "a reduction is not waited for"
        ),
    )
