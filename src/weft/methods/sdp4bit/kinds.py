"""The sum inside nodes that precedes a reduction, its value, and the obligation of programs to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places
from weft.program.program import Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, ValueKind

VALUES.register(ValueKind(name="inside_sum", scope=(*PER_STAGE, "part"), until="freed"))

REDUCE_INSIDE = KINDS.register(
    Kind(
        name="reduce_inside",
        symbol="RI",
        stream="collective_inside",
        reads=("weight_gradient",),
        writes=("inside_sum",),
        collective=True,
        joins_replicas=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class ReducesInside(Owed):
    """The obligation of replicas to add up each gradient among `neighbours` before its reduction."""

    neighbours: int

    @property
    def facts(self) -> Mapping[str, str]:
        return {"gradients added up inside nodes": f"{self.neighbours} replicas"}


def two_levels(program: Program, rows: Ints) -> Places:
    """Return all rows in programs whose replicas reduce inside nodes first, else none."""
    owed = isinstance(program.obligations.methods.get("sdp4bit"), ReducesInside)
    return Places(rows if owed else rows[:0])


USES = (AddedUses(kinds=("reduce",), reads=(Read("inside_sum", at=two_levels, consumes=True),)),)
