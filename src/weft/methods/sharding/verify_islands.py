"""Replicas that share out in islands add up the gradients of all islands, each once.

Islands are disjoint, together they hold every replica, and those
that meet across them own the same share: so every gradient is in every sum once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from weft.errors import Violation
from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.program.checks.report import name, rows_of, violations
from weft.program.program import NONE, Ints, Program


def check_islands(program: Program, islands: int) -> list[Violation]:
    """Everything that keeps so many islands from adding up each gradient once."""
    # A folded program has the rows of one replica only.
    if islands == 1 or program.kept_replica is not None:
        return []
    return _check_members(program, rows_of(program, REDUCE_ACROSS))


def _add_up_once(island_of: Mapping[int, tuple[int, ...]], replicas: int) -> bool:
    """Whether ranks with these islands own the same share of one each, and the islands are all `replicas`."""
    islands = list(island_of.values())
    everyone = {rank for island in islands for rank in island}
    if not sum(map(len, islands)) == len(everyone) == replicas or len(set(map(len, islands))) > 1:
        return False
    # Shares are owned in the order of the ranks.
    places = {sum(other < rank for other in island) for rank, island in island_of.items()}
    return len(places) == 1 and all(rank in island for rank, island in island_of.items())


def _check_members(program: Program, across: Ints) -> list[Violation]:
    """Who meets across islands, and that a rank gathers and reduces in the same one."""
    columns = program.columns
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
