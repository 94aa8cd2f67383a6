"""The sum of the experts' tokens over ranks, which backward passes wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.describe.plan import EXPERT_BALANCE
from weft.program.arrays import Ints
from weft.program.codes import codes
from weft.program.kinds import FORWARD, KINDS, AddedUses, Kind
from weft.program.places import Places, is_stepped, join
from weft.program.program import NONE, Owed, Program
from weft.program.segments import last_segments
from weft.program.values import PER_MICRO_BATCH, PER_RANK, VALUES, Read, Use, ValueKind


@dataclass(frozen=True, kw_only=True)
class BalancesExperts(Owed):
    """The obligation of stages with experts to balance them.

    Attributes:
        stages: those stages.
        counts: True if their backward passes wait for counts of several ranks or micro-batches.
        biases: True if every step changes the biases of routers by the loads.
    """

    stages: tuple[int, ...]
    counts: bool
    biases: bool

    @property
    def facts(self) -> Mapping[str, str]:
        return {"stages with balanced experts": str(len(self.stages))}


def owed_by(program: Program) -> BalancesExperts | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(EXPERT_BALANCE)
    return owed if isinstance(owed, BalancesExperts) else None


def balanced(program: Program, rows: Ints) -> Places:
    """Return the trained passes of stages with experts."""
    owed = owed_by(program)
    stages = () if owed is None else owed.stages
    here = np.isin(program.columns.stage[rows], np.array(stages, dtype=np.int64))
    return Places(rows[here & is_stepped(program, rows)])


def counted(program: Program, rows: Ints) -> Places:
    """Return the passes of stages whose backward passes wait for counts."""
    owed = owed_by(program)
    return balanced(program, rows if owed is not None and owed.counts else rows[:0])


def biased(program: Program, rows: Ints) -> Places:
    """Return the steps of stages whose biases follow the loads."""
    owed = owed_by(program)
    if owed is None or not owed.biases:
        return Places(rows[:0])
    return Places(rows[np.isin(program.columns.stage[rows], np.array(owed.stages, dtype=np.int64))])


def on_rank(program: Program, rows: Ints) -> Places:
    """Return all balanced forward passes of each row's rank and step."""
    columns = program.columns
    forwards = balanced(program, np.flatnonzero(columns.kind == FORWARD)).rows
    mine, other = _met(program, rows, forwards, "iteration", "rank")
    moved = {name: getattr(columns, name)[forwards[other]] for name in ("stage", "replica", "micro_batch")}
    return Places(rows[mine], moved)


def summed(program: Program, rows: Ints) -> Places:
    """Return the micro-batches of each sum: of its replica the one with its `part`, or all of its step."""
    columns = program.columns
    forwards = balanced(program, np.flatnonzero(columns.kind == FORWARD)).rows
    mine, other = _met(program, rows, forwards, "iteration", "stage", "replica", "rank")
    number, part = columns.micro_batch[forwards[other]], columns.part[rows[mine]]
    first = np.full(len(rows), np.iinfo(np.int64).max)
    np.minimum.at(first, mine, number)
    counted = (part == NONE) | (part == number - first[mine])
    return Places(rows[mine[counted]], {"micro_batch": number[counted]})


def _met(program: Program, rows: Ints, others: Ints, *names: str) -> tuple[Ints, Ints]:
    """Return the indices of all pairs of `rows` and `others` with equal columns of these names."""
    both = np.concatenate([rows, others])
    place = codes(*(getattr(program.columns, name)[both] for name in names))
    return join(place[: len(rows)], place[len(rows) :])


# The sums of a rank's forward pass, and what follows for its backward pass from those of all that count
# together. The loads are for the report.
VALUES.register(ValueKind(name="expert_share", scope=PER_MICRO_BATCH, until="freed"))
VALUES.register(ValueKind(name="expert_counts", scope=PER_MICRO_BATCH, until="read"))
VALUES.register(ValueKind(name="expert_loads", scope=PER_RANK, until="step"))

EXPERT_COUNTS = KINDS.register(
    Kind(
        name="expert_counts",
        symbol="EC",
        stream="collective",
        reads=(Read("expert_share", at=summed),),
        writes=(Use("expert_counts", at=summed),),
        collective=True,
    )
)
EXPERT_LOADS = KINDS.register(
    Kind(
        name="expert_loads",
        symbol="EL",
        stream="collective",
        reads=(Read("expert_share", at=on_rank, consumes=True, waits="last"),),
        writes=("expert_loads",),
        collective=True,
        spans_stages=True,
    )
)

USES = (
    AddedUses(kinds=("forward",), writes=(Use("expert_share", at=balanced),)),
    AddedUses(kinds=("backward", "backward_input"), reads=(Read("expert_counts", at=counted),)),
    AddedUses(
        kinds=("backward_segment", "input_segment"),
        reads=(
            Read("expert_counts", at=lambda program, rows: counted(program, last_segments(program, rows))),
        ),
    ),
    AddedUses(kinds=("step",), reads=(Read("expert_loads", at=biased),)),
)
