"""The instructions of micro-batch clipping, and the values that order them.

A backward pass adds to the stage's gradient. `take_gradient` moves the gradient of a clipped micro-batch out
of its way, stage by stage. `clip_gradient` finds its norm over all stages and ranks of the replica. It adds
the gradients of the rank's stages, scaled, to the step's sums. `bound_gradient` brings the sums to the bound
of all replicas, and puts them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.describe.plan import MICRO_BATCH_CLIPPING
from weft.program.arrays import Ints
from weft.program.codes import codes
from weft.program.kinds import FORWARD, KINDS, AddedUses, Kind
from weft.program.places import Places, join, stepped_on_rank
from weft.program.program import Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, Use, ValueKind


@dataclass(frozen=True, kw_only=True)
class ClipsMicroBatches(Owed):
    """The obligation of every step to clip groups of `together` of the plan's micro-batches.

    `sources` of the data have sums and bounds of their own. `first_stages` read samples: the input part of
    their split backward passes adds to the gradient, too. `apart`: the stages that clip by norms of
    their own; 0: the model has one norm.
    """

    together: int
    sources: int
    first_stages: tuple[int, ...]
    apart: int = 0

    @property
    def by_stage(self) -> bool:
        return self.apart > 0

    @property
    def facts(self) -> Mapping[str, str]:
        scope = {"clipped by the norm of": "each stage"} if self.by_stage else {}
        return {"micro-batches clipped together": str(self.together), **scope}


def owed_by(program: Program) -> ClipsMicroBatches | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(MICRO_BATCH_CLIPPING)
    return owed if isinstance(owed, ClipsMicroBatches) else None


def clips(program: Program, rows: Ints) -> Places:
    """Return all rows in programs that clip, else none."""
    return Places(rows if owed_by(program) is not None else rows[:0])


def of_rank(program: Program, rows: Ints) -> Places:
    """Return each stage that the row's rank steps, in programs that clip; else none."""
    return stepped_on_rank(program, clips(program, rows).rows)


def of_group(program: Program, rows: Ints) -> Places:
    """Return the clipped micro-batch of its replica that each backward pass is a part of."""
    return Places(rows, {"part": _groups(program, rows)}) if owed_by(program) else Places(rows[:0])


def of_group_before(program: Program, rows: Ints) -> Places:
    """Return the clipped micro-batch before that of each backward pass, if its replica has one."""
    group = _groups(program, rows)
    return Places(rows[group > 0], {"part": group[group > 0] - 1})


def first_of_group(program: Program, rows: Ints) -> Places:
    """Return the places of `of_group` for stages that read samples."""
    return of_group(program, _of_first_stages(program, rows))


def first_of_group_before(program: Program, rows: Ints) -> Places:
    """Return the places of `of_group_before` for stages that read samples."""
    return of_group_before(program, _of_first_stages(program, rows))


def _of_first_stages(program: Program, rows: Ints) -> Ints:
    owed = owed_by(program)
    return rows[np.isin(program.columns.stage[rows], owed.first_stages if owed else ())]


def _groups(program: Program, rows: Ints) -> Ints:
    """Return the number in its replica of each row's clipped micro-batch; 0 in programs that do not clip."""
    owed, columns = owed_by(program), program.columns
    if owed is None:
        return np.zeros_like(rows)
    forwards = np.flatnonzero(columns.kind == FORWARD)
    both = np.concatenate([rows, forwards])
    place = codes(columns.iteration[both], columns.stage[both], columns.replica[both])
    mine, other = join(place[: len(rows)], place[len(rows) :])
    first = np.full(len(rows), np.iinfo(np.int64).max)
    np.minimum.at(first, mine, columns.micro_batch[forwards[other]])
    numbers: Ints = (columns.micro_batch[rows] - first) // owed.together
    return numbers


PER_GROUP = (*PER_STAGE, "part")
# The gradient that passes add up, until it is taken; and that its place is empty again.
VALUES.register(ValueKind(name="fresh_gradient", scope=PER_GROUP, until="freed", accumulates=True))
VALUES.register(ValueKind(name="empty_gradient", scope=PER_GROUP, until="step"))
VALUES.register(ValueKind(name="taken_gradient", scope=PER_GROUP, until="freed"))
# The sum of clipped gradients, and the whole gradient of the step.
VALUES.register(ValueKind(name="clipped_sum", scope=PER_STAGE, until="freed", accumulates=True))
VALUES.register(ValueKind(name="bounded_gradient", scope=PER_STAGE, until="read"))

TAKE_GRADIENT = KINDS.register(
    Kind(
        name="take_gradient",
        symbol="TG",
        stream="compute",
        reads=(Read("fresh_gradient", consumes=True),),
        writes=("taken_gradient", "empty_gradient"),
    )
)
CLIP_GRADIENT = KINDS.register(
    Kind(
        name="clip_gradient",
        symbol="CG",
        stream="collective",
        reads=(Read("taken_gradient", at=stepped_on_rank, consumes=True),),
        writes=(Use("clipped_sum", at=stepped_on_rank),),
        collective=True,
        spans_stages=True,
    )
)
BOUND_GRADIENT = KINDS.register(
    Kind(
        name="bound_gradient",
        symbol="BG",
        stream="collective",
        reads=(Read("clipped_sum", at=stepped_on_rank, consumes=True),),
        writes=(Use("bounded_gradient", at=stepped_on_rank),),
        collective=True,
        spans_stages=True,
    )
)
# The same for one stage, by its own norm: another method.
CLIP_STAGE = KINDS.register(
    Kind(
        name="clip_stage_gradient",
        symbol="CS",
        stream="collective",
        reads=(Read("taken_gradient", consumes=True),),
        writes=("clipped_sum",),
        collective=True,
    )
)
BOUND_STAGE = KINDS.register(
    Kind(
        name="bound_stage_gradient",
        symbol="BS",
        stream="collective",
        reads=(Read("clipped_sum", consumes=True),),
        writes=("bounded_gradient",),
        collective=True,
    )
)
CLIP_KINDS, BOUND_KINDS = (CLIP_GRADIENT, CLIP_STAGE), (BOUND_GRADIENT, BOUND_STAGE)

USES = (
    AddedUses(
        kinds=("backward", "backward_weight", "backward_segment", "weight_segment"),
        reads=(Read("empty_gradient", at=of_group_before),),
        writes=(Use("fresh_gradient", at=of_group),),
    ),
    AddedUses(
        kinds=("backward_input",),
        reads=(Read("empty_gradient", at=first_of_group_before),),
        writes=(Use("fresh_gradient", at=first_of_group),),
    ),
    AddedUses(kinds=("reduce", "step"), reads=(Read("bounded_gradient", at=clips),)),
    AddedUses(kinds=("norm",), reads=(Read("bounded_gradient", at=of_rank),)),
)
