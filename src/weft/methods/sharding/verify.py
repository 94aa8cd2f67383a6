"""The checks that sharding replicas keep to their buffers and islands.

A gather takes the room of exactly one free. No more stages accumulate gradients at once than there are
buffers for them. Islands add up the gradients of all islands, each once. They are disjoint, and together they
hold every replica. Ranks that meet across islands own the same shard. Ranks of replicas with unlike numbers
of them hold the shard in which they meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from weft.errors import Violation
from weft.methods.sharding.kinds import FREE, GATHER, REDUCE, REDUCE_ACROSS, SharesOut
from weft.program.buffers import SHARDED_BUFFERS
from weft.program.checks.report import name, rows_of, violations
from weft.program.kinds import COMPUTATIONS, MAKES_GRADIENTS
from weft.program.program import NONE, Program


def check_sharding(program: Program, owed: SharesOut | None) -> list[Violation]:
    """Return the violations of the sharding that a program owes."""
    if owed is None:
        return _check_shards(program)
    found = _check_shards(program)
    if owed.level == "zero-3":
        found += _check_room(program)
    if owed.level in ("zero-2", "zero-3"):
        found += _check_gradient_buffers(program)
    # A folded program has the rows of one replica only.
    if owed.islands > 1 and program.kept_replica is None:
        found += _check_members(program)
    return found


def _check_room(program: Program) -> list[Violation]:
    """Check that frees and gathers of a rank match one to one: its number of resident stages is constant."""
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


def _check_shards(program: Program) -> list[Violation]:
    """Check that ranks of unlike replicas exchange shards that they hold: those of one lane of the widest."""
    columns, owners = program.columns, program.obligations.owners
    widths: dict[int, set[int]] = {}
    for (stage, _), ranks in owners.items():
        widths.setdefault(stage, set()).add(len(ranks))
    unlike = {stage: max(each) for stage, each in widths.items() if len(each) > 1}
    if not unlike:
        return []
    shards = {
        (stage, rank): set(range(lane * apart, (lane + 1) * apart))
        for (stage, _), ranks in owners.items()
        if stage in unlike
        for apart in [unlike[stage] // len(ranks)]
        for lane, rank in enumerate(ranks)
    }
    rows = [row for row in rows_of(program, GATHER, REDUCE).tolist() if int(columns.stage[row]) in unlike]
    strange = []
    for row in rows:
        held = shards.get((int(columns.stage[row]), int(columns.rank[row])), set())
        group = program.groups[int(columns.group[row])]
        joined = (shards.get((int(columns.stage[row]), rank), set()) for rank in group)
        if int(columns.part[row]) not in held.intersection(*joined):
            strange.append(row)
    return violations(
        "sharding",
        np.array(strange, dtype=np.int64),
        lambda row: f"{name(program, row)} joins ranks that do not all hold shard {columns.part[row]}",
    )


def _check_gradient_buffers(program: Program) -> list[Violation]:
    """Check that buffers suffice; a gradient takes one from its first maker to the wait for its reduction."""
    columns, edges = program.columns, program.edges
    now, kind = edges.distance == 0, columns.kind
    made = now & np.isin(kind[edges.source], MAKES_GRADIENTS) & (kind[edges.target] == REDUCE)
    awaited = now & (kind[edges.source] == REDUCE) & np.isin(kind[edges.target], COMPUTATIONS)
    reduces = rows_of(program, REDUCE)
    begin = np.full(len(columns), len(columns), dtype=np.int64)
    np.minimum.at(begin, edges.target[made], edges.source[made])
    step = columns.rank * program.steps_per_cycle + columns.iteration
    end = np.searchsorted(step, step, side="right")
    np.minimum.at(end, edges.source[awaited], edges.target[awaited])
    begin, end = begin[reduces], end[reduces]
    change = np.concatenate([np.ones(len(reduces), np.int64), -np.ones(len(reduces), np.int64)])
    at = np.concatenate([begin, end])
    # At one place a buffer is freed before it is taken; the end of a rank's step frees all buffers.
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


def _add_up_once(island_of: Mapping[int, tuple[int, ...]], replicas: int) -> bool:
    """Return True if the ranks own the same shard, one in each island, and the islands are all `replicas`."""
    islands = list(island_of.values())
    everyone = {rank for island in islands for rank in island}
    if not sum(map(len, islands)) == len(everyone) == replicas or len(set(map(len, islands))) > 1:
        return False
    # Ranks own shards in the order of the ranks.
    places = {sum(other < rank for other in island) for rank, island in island_of.items()}
    return len(places) == 1 and all(rank in island for rank, island in island_of.items())


def _check_members(program: Program) -> list[Violation]:
    """Check the groups across islands, and that a rank gathers and reduces in the same island."""
    columns, across = program.columns, rows_of(program, REDUCE_ACROSS)
    inside = rows_of(program, GATHER, REDUCE)
    places = zip(columns.stage[inside].tolist(), columns.rank[inside].tolist(), strict=True)
    group_of: dict[tuple[int, int], int] = {}
    twice = []
    for row, at, group in zip(inside.tolist(), places, columns.group[inside].tolist(), strict=True):
        if group_of.setdefault(at, group) != group:
            twice.append(row)
    found = violations(
        "islands",
        np.array(twice, dtype=np.int64),
        lambda row: f"{name(program, row)} is in another island than what came before",
    )
    replicas = Counter(stage for stage, _ in program.obligations.owners)
    calls = np.stack([columns.stage[across], columns.group[across]], axis=1)
    distinct, first = np.unique(calls, axis=0, return_index=True)
    strange = []
    for (stage, group), row in zip(distinct.tolist(), across[first].tolist(), strict=True):
        members = program.groups[group]
        inside_of = {rank: program.groups[group_of.get((stage, rank), NONE)] for rank in members}
        if not _add_up_once(inside_of, replicas[stage]):
            strange.append(row)
    return found + violations(
        "islands",
        np.array(sorted(strange), dtype=np.int64),
        lambda row: f"{name(program, row)} does not add up the same share of every replica once",
    )
