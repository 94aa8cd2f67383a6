"""The norm instruction, which all ranks that step run together before any of them steps."""

from __future__ import annotations

from dataclasses import dataclass

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places, stepped_on_rank
from weft.program.program import Owed, Program
from weft.program.values import PER_RANK, VALUES, Read, ValueKind

VALUES.register(ValueKind(name="gradient_norm", scope=PER_RANK, until="read"))

NORM = KINDS.register(
    Kind(
        name="norm",
        symbol="N",
        stream="collective",
        reads=(
            Read(
                "reduced_gradient",
                at=stepped_on_rank,
                otherwise=Read("weight_gradient", at=stepped_on_rank, waits="last"),
            ),
        ),
        writes=("gradient_norm",),
        collective=True,
        spans_stages=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class TakesNorm(Owed):
    """The obligation of every step to wait for the norm of the whole gradient."""


def owed(program: Program, rows: Ints) -> Places:
    """Return all rows in programs with steps that wait for the gradient's norm, else none."""
    return Places(rows if "gradient-norm" in program.obligations.methods else rows[:0])


USES = (AddedUses(kinds=("step",), reads=(Read("gradient_norm", at=owed),)),)
