"""The sums inside and between nodes of one reduction, their values, and the obligation to run them.

The slices of a reduction number its sums: slice i of its part p has the part p * slices + i. The last sum
between nodes is the reduction itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places
from weft.program.program import Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, ValueKind

VALUES.register(ValueKind(name="inside_sum", scope=(*PER_STAGE, "part"), until="freed"))
VALUES.register(ValueKind(name="between_sum", scope=(*PER_STAGE, "part"), until="freed"))

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
REDUCE_BETWEEN = KINDS.register(
    Kind(
        name="reduce_between",
        symbol="RB",
        stream="collective",
        reads=(Read("inside_sum", consumes=True),),
        writes=("between_sum",),
        collective=True,
        joins_replicas=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class ReducesInside(Owed):
    """The obligation to add up gradients among `neighbours` before other replicas get them, by slices."""

    neighbours: int
    slices: int = 1

    @property
    def facts(self) -> Mapping[str, str]:
        sliced = f", in {self.slices} slices" if self.slices > 1 else ""
        return {"gradients added up inside nodes": f"{self.neighbours} replicas{sliced}"}


def slices_of(program: Program) -> int:
    """Return the slices of a reduction; 0 if replicas do not add up gradients inside nodes first."""
    owed = program.obligations.methods.get("sdp4bit")
    return owed.slices if isinstance(owed, ReducesInside) else 0


def _slices(program: Program, rows: Ints, chosen: Iterable[int]) -> Places:
    """Return a place for each chosen slice of each reduction."""
    count, each = slices_of(program), np.array(list(chosen), dtype=np.int64)
    part = program.columns.part[rows, None] * count + each
    return Places(np.repeat(rows, len(each)), {"part": part.ravel()})


def last_slice(program: Program, rows: Ints) -> Places:
    """Return the last slice of each reduction, if it has slices."""
    count = slices_of(program)
    return _slices(program, rows, range(count)[-1:])


def other_slices(program: Program, rows: Ints) -> Places:
    """Return all slices of each reduction but the last."""
    return _slices(program, rows, range(slices_of(program) - 1))


USES = (
    AddedUses(
        kinds=("reduce",),
        reads=(
            Read("inside_sum", at=last_slice, consumes=True),
            Read("between_sum", at=other_slices, consumes=True),
        ),
    ),
)
