"""The exchange of a stage's matrices, between the two parts of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.methods.tensor_norms.kinds import STEP_READS
from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places
from weft.program.program import Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, ValueKind

NAME = "whole-matrices"


@dataclass(frozen=True, kw_only=True)
class CompletesMatrices(Owed):
    """The obligation of ranks that share a stage to complete its matrices before they step."""

    @property
    def facts(self) -> Mapping[str, str]:
        return {"matrices": "completed before each step"}


def owed_by(program: Program) -> CompletesMatrices | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(NAME)
    return owed if isinstance(owed, CompletesMatrices) else None


def completed(program: Program, rows: Ints) -> Places:
    """Return all rows in programs whose ranks complete matrices, else none."""
    return Places(rows if owed_by(program) is not None else rows[:0])


VALUES.register(ValueKind(name="whole_matrices", scope=PER_STAGE, until="read"))

WHOLE_MATRICES = KINDS.register(
    Kind(
        name="whole_matrices",
        symbol="WM",
        stream="collective",
        reads=STEP_READS,
        writes=("whole_matrices",),
        collective=True,
    )
)

USES = (AddedUses(kinds=("step",), reads=(Read("whole_matrices", at=completed),)),)
