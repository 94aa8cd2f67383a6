"""Places where instructions use values: their own coordinates, or other stages, ranks and micro-batches.

Each function takes a program and rows of one kind, and returns one place per use. A row may use a value at
several places. It uses a value that its program lacks at no place.
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
    """One row for each use; `moved` has the coordinates of uses that differ from their rows'."""

    rows: Ints
    moved: Mapping[str, Ints] = MappingProxyType({})

    def take(self, kept: Mask) -> Places:
        return Places(self.rows[kept], {name: values[kept] for name, values in self.moved.items()})


At = Callable[["Program", Ints], Places]


def own(program: Program, rows: Ints) -> Places:
    """Return the instruction's own coordinates."""
    return Places(rows)


def there(program: Program, rows: Ints) -> Places:
    """Return the other end of the instruction's message."""
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
    """Return a place for every crossing from each stage that the instruction's stage reads."""
    return _crossing(program, rows, "part", _stage_links(program)[:, ::-1])


def of_previous(program: Program, rows: Ints) -> Places:
    """Return the places of `from_previous`, moved to the producing stages."""
    return _crossing(program, rows, "stage", _stage_links(program)[:, ::-1])


def from_next(program: Program, rows: Ints) -> Places:
    """Return a place for every crossing from each stage that reads the instruction's stage."""
    return _crossing(program, rows, "part", _stage_links(program))


def of_next(program: Program, rows: Ints) -> Places:
    """Return the places of `from_next`, moved to the reading stages."""
    return _crossing(program, rows, "stage", _stage_links(program))


def of_sent(program: Program, rows: Ints) -> Places:
    """Return the sending stage's micro-batch that contains the sent one."""
    columns, splits = program.columns, np.array(program.obligations.splits, dtype=np.int64)
    if (splits == 1).all():
        return Places(rows)
    here = splits[columns.stage[rows]]
    finer: Ints = np.maximum(here, splits[columns.part[rows]])
    return Places(rows, {"micro_batch": columns.micro_batch[rows] // (finer // here)})


def trained(program: Program, rows: Ints) -> Places:
    """Return the instruction's own coordinates if its stage is stepped."""
    return Places(rows[is_stepped(program, rows)])


def stepped_on_rank(program: Program, rows: Ints) -> Places:
    """Return each stage that the instruction's rank steps."""
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
    """Return the rows as an array of shape (rows, width), also for no rows."""
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _stage_links(program: Program) -> Ints:
    """Return the pairs (producer, consumer) of stages, shape (pairs, 2)."""
    return table_of(program.obligations.stage_edges)


def _crossing(program: Program, rows: Ints, coordinate: str, links: Ints) -> Places:
    """Return a place for every crossing between a row's stage and the other of its links (stage, other).

    `coordinate` takes the other stage: "stage" with the other's own micro-batches, or "part" with the
    crossing micro-batches.
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
    """Return a place for each link (stage, other) of a row's stage; `coordinate` takes the other stage."""
    mine, link = join(program.columns.stage[rows], links[:, 0])
    return Places(rows[mine], {coordinate: links[link, 1]})


def join(values: Ints, known: Ints) -> tuple[Ints, Ints]:
    """Return the indices of all pairs of equal entries in `values` and `known`, in order of `values`."""
    order = np.argsort(known, kind="stable")
    first = np.searchsorted(known[order], values, side="left")
    count = np.searchsorted(known[order], values, side="right") - first
    mine, step = numbered(count)
    return mine, order[first[mine] + step]


def is_stepped(program: Program, rows: Ints) -> Mask:
    """Return True for each row with a stage that is stepped in the row's replica and step."""
    columns, owed = program.columns, program.obligations.step
    here = columns.stage[rows], columns.replica[rows], columns.iteration[rows]
    both = codes(*(np.concatenate(pair) for pair in zip(owed.T, here, strict=True)))
    return np.isin(both[len(owed) :], both[: len(owed)])
