"""The reduction that the holders of a weight's copies run together, and the gradients that it adds up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.methods.sharding.kinds import between_islands
from weft.program.arrays import Ints
from weft.program.codes import codes
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import At, Places, join, of_links, own, table_of
from weft.program.program import Owed, Program
from weft.program.values import VALUES, Read, Use, ValueKind

# Gradients of a weight that several stages of a rank may have; the weight's number is the part.
VALUES.register(ValueKind(name="tied_gradient", scope=("part",), until="freed", accumulates=True))
VALUES.register(ValueKind(name="reduced_tied_gradient", scope=("part",), until="read"))


@dataclass(frozen=True, kw_only=True)
class TiesStages(Owed):
    """The stages that have a copy of each tied weight.

    `sharded`: replicas hold shards of the copies, and the gradients of a stage contain those of its copy.
    """

    stages: tuple[tuple[int, ...], ...]
    sharded: bool = False


def _owed(program: Program) -> TiesStages:
    owed = program.obligations.methods.get("tying")
    return owed if isinstance(owed, TiesStages) else TiesStages(stages=())


def tied(program: Program, rows: Ints) -> Places:
    """Return each tied weight with a copy in the instruction's stage."""
    links = [(stage, number) for number, stages in enumerate(_owed(program).stages) for stage in stages]
    return of_links(program, rows, "part", table_of(links))


def tied_on_rank(program: Program, rows: Ints) -> Places:
    """Return each tied weight with a copy on the instruction's rank."""
    table = np.unique(_copies(program)[:, :2], axis=0)
    mine, link = join(program.columns.rank[rows], table[:, 0])
    return Places(rows[mine], {"part": table[link, 1]})


def _copies(program: Program) -> Ints:
    """Return the copies as rows (rank, weight, stage, replica)."""
    links = [
        (rank, number, stage, replica)
        for number, stages in enumerate(_owed(program).stages)
        for (stage, replica), ranks in program.obligations.owners.items()
        if stage in stages
        for rank in ranks
    ]
    return table_of(links, 4)


def _whole(at: At) -> At:
    """Return the places `at` in programs with whole copies, else none."""
    return lambda program, rows: at(program, rows[:0] if _owed(program).sharded else rows)


def _sharded(program: Program, rows: Ints) -> Places:
    """Return each stage on the rank with a shard of the instruction's weight."""
    if not _owed(program).sharded:
        return Places(rows[:0])
    columns, copies = program.columns, _copies(program)
    here = columns.rank[rows], columns.part[rows]
    both = codes(*(np.concatenate(pair) for pair in zip(here, copies.T[:2], strict=True)))
    mine, link = join(both[: len(rows)], both[len(rows) :])
    return Places(rows[mine], {"stage": copies[link, 2], "replica": copies[link, 3]})


def _sharded_in_islands(program: Program, rows: Ints) -> Places:
    return _sharded(program, between_islands(program, rows).rows)


REDUCE_TIED = KINDS.register(
    Kind(
        name="reduce_tied",
        symbol="T",
        stream="collective",
        reads=(
            Read("tied_gradient", at=_whole(own), consumes=True),
            Read("reduced_gradient", at=_sharded),
            Read("island_sum", at=_sharded_in_islands),
        ),
        writes=("reduced_tied_gradient",),
        collective=True,
        spans_stages=True,
    )
)

USES = (
    AddedUses(kinds=("backward", "backward_weight"), writes=(Use("tied_gradient", at=_whole(tied)),)),
    AddedUses(kinds=("step",), reads=(Read("reduced_tied_gradient", at=tied),)),
    AddedUses(kinds=("norm",), reads=(Read("reduced_tied_gradient", at=tied_on_rank),)),
)
