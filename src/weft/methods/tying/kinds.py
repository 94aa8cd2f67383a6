"""The reduction that the holders of a weight's copies run together, and the gradients that it adds up."""

from __future__ import annotations

from dataclasses import dataclass

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places, join, of_links, table_of
from weft.program.program import Owed, Program
from weft.program.values import VALUES, Read, Use, ValueKind

# Gradients of a weight that several stages of a rank may have; the weight's number is the part.
VALUES.register(ValueKind(name="tied_gradient", scope=("part",), until="freed", accumulates=True))
VALUES.register(ValueKind(name="reduced_tied_gradient", scope=("part",), until="read"))

REDUCE_TIED = KINDS.register(
    Kind(
        name="reduce_tied",
        symbol="T",
        stream="collective",
        reads=(Read("tied_gradient", consumes=True),),
        writes=("reduced_tied_gradient",),
        collective=True,
        spans_stages=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class TiesStages(Owed):
    """The stages that have a copy of each tied weight."""

    stages: tuple[tuple[int, ...], ...]


def _stages(program: Program) -> tuple[tuple[int, ...], ...]:
    owed = program.obligations.methods.get("tying")
    return owed.stages if isinstance(owed, TiesStages) else ()


def tied(program: Program, rows: Ints) -> Places:
    """Return each tied weight with a copy in the instruction's stage."""
    links = [(stage, number) for number, stages in enumerate(_stages(program)) for stage in stages]
    return of_links(program, rows, "part", table_of(links))


def tied_on_rank(program: Program, rows: Ints) -> Places:
    """Return each tied weight with a copy on the instruction's rank."""
    links = {
        (rank, number): None
        for number, stages in enumerate(_stages(program))
        for (stage, _), ranks in program.obligations.owners.items()
        if stage in stages
        for rank in ranks
    }
    table = table_of(list(links))
    mine, link = join(program.columns.rank[rows], table[:, 0])
    return Places(rows[mine], {"part": table[link, 1]})


USES = (
    AddedUses(kinds=("backward", "backward_weight"), writes=(Use("tied_gradient", at=tied),)),
    AddedUses(kinds=("step",), reads=(Read("reduced_tied_gradient", at=tied),)),
    AddedUses(kinds=("norm",), reads=(Read("reduced_tied_gradient", at=tied_on_rank),)),
)
