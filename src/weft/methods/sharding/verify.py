"""Replicas that share out states read gathered weights and keep to their buffers.

Every read of weights follows a gather of them in the same step and, where weights are freed, precedes their
free; a gather takes the room of exactly one free; and no more stages accumulate gradients at once than there
are buffers for them. Islands add up what they reduce (`weft.methods.sharding.verify_islands`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.describe.plan import Sharding
from weft.errors import Violation
from weft.methods.sharding.kinds import FREE, GATHER, REDUCE
from weft.methods.sharding.verify_islands import check_islands
from weft.program.buffers import SHARDED_BUFFERS
from weft.program.checks.report import EdgeSet, find, name, rows_of, violations
from weft.program.codes import codes
from weft.program.kinds import COMPUTATIONS, MAKES_GRADIENTS, READS_WEIGHTS, STEP
from weft.program.program import Ints, Owed, Program


@dataclass(frozen=True, kw_only=True)
class SharesOut(Owed):
    """Replicas share something out, in so many islands."""

    level: Sharding
    islands: int = 1

    @property
    def facts(self) -> Mapping[str, str]:
        islands = {"islands": str(self.islands)} if self.islands > 1 else {}
        return {"sharding": self.level, **islands}


def check_sharding(program: Program, owed: SharesOut | None) -> list[Violation]:
    """Everything that keeps replicas from sharing out what they should."""
    if owed is None:
        return check_islands(program, 1)
    found = _check_reads(program, everywhere=owed.level == "zero-3")
    if owed.level == "zero-3":
        found += _check_room(program)
    if owed.level in ("zero-2", "zero-3"):
        found += _check_gradient_buffers(program)
    return found + check_islands(program, owed.islands)


def _check_reads(program: Program, *, everywhere: bool) -> list[Violation]:
    """Weights are there when they are read; `everywhere`: also those that no step changes."""
    columns = program.columns
    rows = rows_of(program, GATHER, FREE, *READS_WEIGHTS)
    if not everywhere:
        owed = program.obligations.step
        stepped = find((owed[:, 0], owed[:, 1]), (columns.stage[rows], columns.replica[rows])) != -1
        rows = rows[stepped | (len(owed) == 0)]
    place = codes(columns.rank[rows], columns.stage[rows], columns.replica[rows], columns.iteration[rows])
    rows = rows[np.argsort(place, kind="stable")]
    place = np.sort(place)
    kind = columns.kind[rows]
    change = np.where(kind == GATHER, 1, np.where(kind == FREE, -1, 0))
    first = np.searchsorted(place, place)
    total = np.cumsum(change)
    held = total - (total - change)[first]
    reads = np.isin(kind, READS_WEIGHTS)
    found = violations(
        "sharding",
        rows[(reads & (held != 1)) | ~np.isin(held, (0, 1))],
        lambda row: f"{name(program, row)} is not between a gather of its weights and their free",
    )
    after_gather = np.flatnonzero(reads[1:] & (kind[:-1] == GATHER) & (place[1:] == place[:-1]))
    gather, read = rows[after_gather], rows[after_gather + 1]
    edges = EdgeSet(program)
    found += violations(
        "sharding",
        read[~edges.has(gather, read)],
        lambda row: f"{name(program, row)} does not wait for the gather of its weights",
    )
    opens = np.flatnonzero((kind == GATHER) & (first == np.arange(len(rows))))
    return found + _check_fresh(program, edges, rows[opens])


def _check_fresh(program: Program, edges: EdgeSet, gathers: Ints) -> list[Violation]:
    """The first gather of a step gets what the step before has made of the weights."""
    columns, steps = program.columns, rows_of(program, STEP)
    keys = [
        (columns.stage[rows], columns.replica[rows], columns.rank[rows], columns.iteration[rows])
        for rows in (steps, gathers)
    ]
    before = (keys[1][3] - 1) % program.steps_per_cycle
    step = np.append(steps, -1)[find(keys[0], (*keys[1][:3], before))]
    distance = (columns.iteration[gathers] == 0).astype(np.int64)
    return violations(
        "sharding",
        gathers[(step != -1) & ~edges.has(step, gathers, distance)],
        lambda row: f"{name(program, row)} does not wait for the optimizer step before it",
    )


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
