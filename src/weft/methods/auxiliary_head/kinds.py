"""The loss of an auxiliary head: a stage's forward pass makes it, and its backward pass starts from it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import Violation
from weft.program.arrays import Ints
from weft.program.kinds import AddedUses
from weft.program.places import Places, is_stepped
from weft.program.program import Owed, Program
from weft.program.values import PER_MICRO_BATCH, VALUES, Read, Use, ValueKind

VALUES.register(ValueKind(name="auxiliary_loss", scope=PER_MICRO_BATCH, until="freed"))


@dataclass(frozen=True, kw_only=True)
class HasHead(Owed):
    """The obligation of one stage's backward passes to start from an auxiliary head's loss, too."""

    stage: int


def headed(program: Program, rows: Ints) -> Places:
    """Return the rows that run the head's stage, if it is trained."""
    owed = program.obligations.methods.get("auxiliary-head")
    if not isinstance(owed, HasHead):
        return Places(rows[:0])
    here = program.columns.stage[rows] == owed.stage
    return Places(rows[here & is_stepped(program, rows)])


def check_head(program: Program, owed: HasHead | None) -> list[Violation]:
    """Return a violation if no rank steps the head's stage."""
    stepped = {int(stage) for stage in program.obligations.step[:, 0]}
    if owed is None or owed.stage in stepped:
        return []
    return [Violation("auxiliary head", f"stage {owed.stage} has it, and no rank steps that stage")]


USES = (
    AddedUses(kinds=("forward",), writes=(Use("auxiliary_loss", at=headed),)),
    AddedUses(
        kinds=("backward", "backward_input"), reads=(Read("auxiliary_loss", at=headed, consumes=True),)
    ),
)
