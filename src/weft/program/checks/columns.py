"""The law of columns: columns and edges are in range, rows are sorted by rank and step, ids are unique."""

from __future__ import annotations

import numpy as np

from weft.errors import Violation
from weft.program.arrays import Ints, Mask
from weft.program.checks.report import name, violations
from weft.program.kinds import KINDS, is_collective, message_kinds
from weft.program.program import COLUMN_NAMES, NONE, Program


def check_shape(program: Program) -> list[Violation]:
    """Check lengths, ranges and the order of rows by rank, which must hold before a row can be named."""
    columns, edges = program.columns, program.edges
    found = []
    if program.steps_per_cycle < 1 or program.ranks < 1:
        found.append(Violation("program", "needs at least one rank and one step per cycle", "1"))
    if len({len(getattr(columns, column)) for column in COLUMN_NAMES}) > 1:
        found.append(Violation("columns", "have different lengths"))
    if len({len(edges.source), len(edges.target), len(edges.distance)}) > 1:
        found.append(Violation("edges", "source, target and distance have different lengths"))
    if found:
        return found
    limits = {
        "kind": (0, len(KINDS)),
        "stage": (NONE, None),
        "micro_batch": (NONE, None),
        "iteration": (NONE, program.steps_per_cycle),
        "rank": (0, program.ranks),
        "replica": (NONE, None),
        "part": (NONE, None),
        "peer": (NONE, program.ranks),
        "group": (NONE, len(program.groups)),
        "bytes": (0, None),
        "most_bytes": (0, None),
    }
    for column, (low, high) in limits.items():
        values = getattr(columns, column)
        found += _out_of_range(f"columns.{column}", "row", values, low, high)
    for end in ("source", "target"):
        found += _out_of_range(f"edges.{end}", "edge", getattr(edges, end), 0, len(program))
    found += _out_of_range("edges.distance", "edge", edges.distance, 0, None)
    unsorted = np.flatnonzero(np.diff(columns.rank) < 0) + 1
    return found + violations("columns.rank", unsorted, lambda row: f"row {row} belongs to an earlier rank")


def check_coordinates(program: Program) -> list[Violation]:
    """Check peers, groups, payloads, the order of steps, owners of stages, and that ids differ."""
    columns = program.columns
    # The host of a rank issues one step after the other.
    early = np.flatnonzero((np.diff(columns.rank) == 0) & (np.diff(columns.iteration) < 0)) + 1
    found = violations(
        "steps", early, lambda row: f"{name(program, row)} comes after an instruction of a later step"
    )
    message = np.isin(columns.kind, [kind for pair in message_kinds() for kind in pair])
    collective = is_collective(columns.kind)
    found += violations(
        "peers",
        np.flatnonzero(message & ((columns.peer == NONE) | (columns.peer == columns.rank))),
        lambda row: f"{name(program, row)} needs another rank as its peer",
    )
    found += violations(
        "groups",
        np.flatnonzero(collective & ~_in_group(program)),
        lambda row: f"{name(program, row)} is not in group {columns.group[row]}",
    )
    found += violations(
        "groups",
        np.flatnonzero(~collective & (columns.group != NONE)),
        lambda row: f"{name(program, row)} has a group but is no collective",
    )
    found += violations(
        "owners",
        np.flatnonzero((columns.stage != NONE) & (columns.replica != NONE) & ~_owned(program)),
        lambda row: (
            f"{name(program, row)} runs on a rank that does not own stage {columns.stage[row]} "
            f"of replica {columns.replica[row]}"
        ),
    )
    found += violations(
        "columns.most_bytes",
        np.flatnonzero(columns.most_bytes < columns.bytes),
        lambda row: (
            f"{name(program, row)} has room for {columns.most_bytes[row]} bytes and expects "
            f"{columns.bytes[row]}"
        ),
    )
    order = np.argsort(program.ids, kind="stable")
    twins = np.flatnonzero(np.diff(program.ids[order]) == 0)
    return found + violations(
        "ids",
        twins,
        lambda row: f"{name(program, order[row])} and {name(program, order[row + 1])} have the same id",
    )


def _out_of_range(where: str, entry: str, values: Ints, low: int, high: int | None) -> list[Violation]:
    """Return the violations of values below `low` or from `high` on; None is no upper bound."""
    bad = values < low
    if high is not None:
        bad |= values >= high
    allowed = f"{low} or more" if high is None else f"{low}..{high - 1}"
    return violations(
        where, np.flatnonzero(bad), lambda row: f"{entry} {row}: {values[row]} is not {allowed}"
    )


def _in_group(program: Program) -> Mask:
    members = [(index, rank) for index, group in enumerate(program.groups) for rank in group]
    known = np.array([index * program.ranks + rank for index, rank in members], dtype=np.int64)
    columns = program.columns
    member: Mask = np.isin(columns.group * program.ranks + columns.rank, known)
    member &= columns.group != NONE
    return member


def _owned(program: Program) -> Mask:
    columns = program.columns
    replicas = int(columns.replica.max(initial=0)) + 1
    known = np.array(
        [
            (stage * replicas + replica) * program.ranks + rank
            for (stage, replica), ranks in program.obligations.owners.items()
            if replica < replicas
            for rank in ranks
        ],
        dtype=np.int64,
    )
    return np.isin((columns.stage * replicas + columns.replica) * program.ranks + columns.rank, known)
