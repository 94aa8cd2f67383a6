"""Where instructions use values: at their own coordinates, or at those of neighbours, stages or weights.

Each function takes a program and rows of one kind, and gives one place for every use: a row may use a value
at several places, or, where its program has no such value, at none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.program.codes import codes

if TYPE_CHECKING:
    from weft.program.program import Program

_Ints = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class Places(NamedTuple):
    """Rows, one for each use, and the coordinates in which a use is not at its row's own."""

    rows: _Ints
    moved: Mapping[str, _Ints] = MappingProxyType({})

    def take(self, kept: _Mask) -> Places:
        return Places(self.rows[kept], {name: values[kept] for name, values in self.moved.items()})


At = Callable[["Program", _Ints], Places]


def own(program: Program, rows: _Ints) -> Places:
    """At the coordinates of the instruction."""
    return Places(rows)


def there(program: Program, rows: _Ints) -> Places:
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


def from_previous(program: Program, rows: _Ints) -> Places:
    """Once for each stage whose output the instruction's stage reads, as what arrived from it."""
    return _of_links(program, rows, "part", _stage_links(program)[:, ::-1])


def of_previous(program: Program, rows: _Ints) -> Places:
    """At each stage whose output the instruction's stage reads."""
    return _of_links(program, rows, "stage", _stage_links(program)[:, ::-1])


def from_next(program: Program, rows: _Ints) -> Places:
    """Once for each stage that reads the output of the instruction's stage, as what arrived from it."""
    return _of_links(program, rows, "part", _stage_links(program))


def of_next(program: Program, rows: _Ints) -> Places:
    """At each stage that reads the output of the instruction's stage."""
    return _of_links(program, rows, "stage", _stage_links(program))


def trained(program: Program, rows: _Ints) -> Places:
    """Where the instruction's stage is stepped."""
    return Places(rows[_is_stepped(program, rows)])


def gathered(program: Program, rows: _Ints) -> Places:
    """Where the instruction's stage has its weights gathered."""
    return Places(rows[_is_gathered(program, rows)])


def kept_whole(program: Program, rows: _Ints) -> Places:
    """Where every replica keeps all weights of the instruction's stage."""
    return Places(rows[~_is_gathered(program, rows)])


def between_islands(program: Program, rows: _Ints) -> Places:
    """In programs of several islands."""
    return Places(rows if program.meta.get("islands", "1") != "1" else rows[:0])


def norm_owed(program: Program, rows: _Ints) -> Places:
    """In programs whose steps wait for the norm of the gradient."""
    return Places(rows if program.obligations.gradient_norm else rows[:0])


def tied(program: Program, rows: _Ints) -> Places:
    """At each tied weight of which the instruction's stage has a copy."""
    weights = program.obligations.tied
    links = [(stage, number) for number, stages in enumerate(weights) for stage in stages]
    return _of_links(program, rows, "part", _table(links))


def stepped_on_rank(program: Program, rows: _Ints) -> Places:
    """At each stage that the instruction's rank steps."""
    owed, owners = program.obligations.step, program.obligations.owners
    links = [
        (rank, stage, replica)
        for stage, replica in dict.fromkeys(map(tuple, owed[:, :2].tolist()))
        for rank in owners.get((stage, replica), ())
    ]
    table = _table(links, 3)
    mine, link = _join(program.columns.rank[rows], table[:, 0])
    return Places(rows[mine], {"stage": table[link, 1], "replica": table[link, 2]})


def stepped_between_islands(program: Program, rows: _Ints) -> Places:
    """At each stage that the instruction's rank steps, in programs of several islands."""
    return stepped_on_rank(program, between_islands(program, rows).rows)


def tied_on_rank(program: Program, rows: _Ints) -> Places:
    """At each tied weight of which the instruction's rank has a copy."""
    weights, owners = program.obligations.tied, program.obligations.owners
    links = {
        (rank, number): None
        for number, stages in enumerate(weights)
        for (stage, _), ranks in owners.items()
        if stage in stages
        for rank in ranks
    }
    table = _table(list(links))
    mine, link = _join(program.columns.rank[rows], table[:, 0])
    return Places(rows[mine], {"part": table[link, 1]})


def _table(rows: Sequence[tuple[int, ...]], width: int = 2) -> _Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _stage_links(program: Program) -> _Ints:
    """Pairs (producer, consumer)."""
    return _table(program.obligations.stage_edges)


def _of_links(program: Program, rows: _Ints, coordinate: str, links: _Ints) -> Places:
    """One place for each of the links (stage, other) of a row's stage; `coordinate` is the other there."""
    mine, link = _join(program.columns.stage[rows], links[:, 0])
    return Places(rows[mine], {coordinate: links[link, 1]})


def _join(values: _Ints, known: _Ints) -> tuple[_Ints, _Ints]:
    """Indices of all pairs of equal entries of `values` and `known`, in order of the values."""
    order = np.argsort(known, kind="stable")
    first = np.searchsorted(known[order], values, side="left")
    count = np.searchsorted(known[order], values, side="right") - first
    mine = np.repeat(np.arange(len(values), dtype=np.int64), count)
    step = np.arange(len(mine), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return mine, order[np.repeat(first, count) + step]


def _is_stepped(program: Program, rows: _Ints) -> _Mask:
    columns, owed = program.columns, program.obligations.step
    here = columns.stage[rows], columns.replica[rows], columns.iteration[rows]
    both = codes(*(np.concatenate(pair) for pair in zip(owed.T, here, strict=True)))
    found: _Mask = np.isin(both[len(owed) :], both[: len(owed)])
    return found


def _is_gathered(program: Program, rows: _Ints) -> _Mask:
    """Shared out are all weights, or those that are stepped; an evaluation steps none and gathers all."""
    sharding = program.meta.get("sharding", "zero-0")
    if sharding == "zero-0":
        return np.zeros(len(rows), dtype=np.bool_)
    if sharding == "zero-3" or not len(program.obligations.step):
        return np.ones(len(rows), dtype=np.bool_)
    return _is_stepped(program, rows)
