"""Where instructions use values: at their own coordinates, or at those of neighbours, stages or weights.

Each function takes a program and rows of one kind, and gives one place for every use: a row may use a value
at several places, or, where its program has no such value, at none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.program.arrays import Ints, Mask
from weft.program.codes import codes, numbered

if TYPE_CHECKING:
    from weft.program.program import Program


class Places(NamedTuple):
    """Rows, one for each use, and the coordinates in which a use is not at its row's own."""

    rows: Ints
    moved: Mapping[str, Ints] = MappingProxyType({})

    def take(self, kept: Mask) -> Places:
        return Places(self.rows[kept], {name: values[kept] for name, values in self.moved.items()})


At = Callable[["Program", Ints], Places]


def own(program: Program, rows: Ints) -> Places:
    """At the coordinates of the instruction."""
    return Places(rows)


def there(program: Program, rows: Ints) -> Places:
    """At the other end of the instruction's message."""
    columns = program.columns
    return Places(
        rows,
        {
            "rank": columns.peer[rows],
            "peer": columns.rank[rows],
            "stage": columns.part[rows],
            "part": columns.stage[rows],
        },
    )


def from_previous(program: Program, rows: Ints) -> Places:
    """Once for all that crosses from each stage whose output the instruction's stage reads."""
    return _crossing(program, rows, "part", _stage_links(program)[:, ::-1])


def of_previous(program: Program, rows: Ints) -> Places:
    """Likewise, at each such stage."""
    return _crossing(program, rows, "stage", _stage_links(program)[:, ::-1])


def from_next(program: Program, rows: Ints) -> Places:
    """Once for all that crosses from each stage that reads the output of the instruction's stage."""
    return _crossing(program, rows, "part", _stage_links(program))


def of_next(program: Program, rows: Ints) -> Places:
    """Likewise, at each such stage."""
    return _crossing(program, rows, "stage", _stage_links(program))


def of_sent(program: Program, rows: Ints) -> Places:
    """At the micro-batch of the sending stage that has what the instruction sends."""
    columns, splits = program.columns, np.array(program.obligations.splits, dtype=np.int64)
    if (splits == 1).all():
        return Places(rows)
    here = splits[columns.stage[rows]]
    finer: Ints = np.maximum(here, splits[columns.part[rows]])
    return Places(rows, {"micro_batch": columns.micro_batch[rows] // (finer // here)})


def trained(program: Program, rows: Ints) -> Places:
    """Where the instruction's stage is stepped."""
    return Places(rows[is_stepped(program, rows)])


def stepped_on_rank(program: Program, rows: Ints) -> Places:
    """At each stage that the instruction's rank steps."""
    owed, owners = program.obligations.step, program.obligations.owners
    links = [
        (rank, stage, replica)
        for stage, replica in dict.fromkeys(map(tuple, owed[:, :2].tolist()))
        for rank in owners.get((stage, replica), ())
    ]
    table = table_of(links, 3)
    mine, link = join(program.columns.rank[rows], table[:, 0])
    return Places(rows[mine], {"stage": table[link, 1], "replica": table[link, 2]})


def table_of(rows: Sequence[tuple[int, ...]], width: int = 2) -> Ints:
    """Return the rows as an array, also where there are none; shape (rows, width)."""
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _stage_links(program: Program) -> Ints:
    """Pairs (producer, consumer)."""
    return table_of(program.obligations.stage_edges)


def _crossing(program: Program, rows: Ints, coordinate: str, links: Ints) -> Places:
    """One place for all that crosses between a row's stage and the other of each of its links (stage, other).

    `coordinate` is the other there: as the "stage", with its own micro-batches, or as the "part", with those
    that cross.
    """
    places = of_links(program, rows, coordinate, links)
    splits: Ints = np.array(program.obligations.splits, dtype=np.int64)
    if (splits == 1).all():
        return places
    here, there = splits[program.columns.stage[places.rows]], splits[places.moved[coordinate]]
    count = np.maximum(here, there) // here
    which, within = numbered(count)
    number = program.columns.micro_batch[places.rows][which] * count[which] + within
    if coordinate == "stage":
        number //= (np.maximum(here, there) // there)[which]
    return Places(places.rows[which], {coordinate: places.moved[coordinate][which], "micro_batch": number})


def of_links(program: Program, rows: Ints, coordinate: str, links: Ints) -> Places:
    """One place for each of the links (stage, other) of a row's stage; `coordinate` is the other there."""
    mine, link = join(program.columns.stage[rows], links[:, 0])
    return Places(rows[mine], {coordinate: links[link, 1]})


def join(values: Ints, known: Ints) -> tuple[Ints, Ints]:
    """Return indices of all pairs of equal entries of `values` and `known`, in order of the values."""
    order = np.argsort(known, kind="stable")
    first = np.searchsorted(known[order], values, side="left")
    count = np.searchsorted(known[order], values, side="right") - first
    mine, step = numbered(count)
    return mine, order[first[mine] + step]


def is_stepped(program: Program, rows: Ints) -> Mask:
    """Return whether each row's stage is stepped in its replica and step."""
    columns, owed = program.columns, program.obligations.step
    here = columns.stage[rows], columns.replica[rows], columns.iteration[rows]
    both = codes(*(np.concatenate(pair) for pair in zip(owed.T, here, strict=True)))
    found: Mask = np.isin(both[len(owed) :], both[: len(owed)])
    return found
