"""The squares of each micro-batch's gradient on a rank, and the instruction that combines all squares."""

from __future__ import annotations

from dataclasses import dataclass

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places, stepped_on_rank
from weft.program.program import Owed, Program
from weft.program.values import PER_RANK, PER_STAGE, VALUES, Read, Use, ValueKind

# Sums of squares per micro-batch of a rank's part of a stage's gradient, and the norms of all micro-batches.
VALUES.register(ValueKind(name="gradient_squares", scope=PER_STAGE, until="freed", accumulates=True))
VALUES.register(ValueKind(name="micro_batch_norms", scope=PER_RANK, until="step"))

MICRO_BATCH_NORMS = KINDS.register(
    Kind(
        name="micro_batch_norms",
        symbol="M",
        stream="collective",
        reads=(Read("gradient_squares", at=stepped_on_rank, consumes=True, waits="last"),),
        writes=("micro_batch_norms",),
        collective=True,
        spans_stages=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class TellsNorms(Owed):
    """The obligation of every step to report the norms of its micro-batches."""


def seen(program: Program, rows: Ints) -> Places:
    """Return all rows in programs that owe the norms, else none."""
    return Places(rows if "micro-batch-norms" in program.obligations.methods else rows[:0])


USES = (AddedUses(kinds=("backward", "backward_weight"), writes=(Use("gradient_squares", at=seen),)),)
