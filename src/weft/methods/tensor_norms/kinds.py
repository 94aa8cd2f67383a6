"""The exchange of a stage's sums over whole tensors, which divides the optimizer's step into parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from weft.methods.gradient_norm.kinds import owed as clipped
from weft.methods.offload.kinds import stepped_from_host
from weft.methods.sharding.kinds import between_islands
from weft.methods.tying.kinds import tied
from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import At, Places, own
from weft.program.program import Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, ValueKind

NAME = "tensor-norms"


@dataclass(frozen=True, kw_only=True)
class TakesTensorNorms(Owed):
    """The obligation of every stage to exchange `exchanges` times before it steps.

    `local`: the ranks of each replica exchange apart from the others.
    """

    exchanges: int
    local: bool = False

    @property
    def facts(self) -> Mapping[str, str]:
        return {"exchanges of tensor norms": str(self.exchanges)}


def owed_by(program: Program) -> TakesTensorNorms | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(NAME)
    return owed if isinstance(owed, TakesTensorNorms) else None


def first(at: At = own) -> At:
    """Return the places `at` of the first exchange of each step."""
    return lambda program, rows: at(program, rows[program.columns.part[rows] == 0])


def of_first(read: Read) -> Read:
    """Return the read by the first exchange of each step."""
    otherwise = None if read.otherwise is None else of_first(read.otherwise)
    return replace(read, at=first(read.at), otherwise=otherwise)


def before(program: Program, rows: Ints) -> Places:
    """Return the place of the exchange before each exchange but the first."""
    later = rows[program.columns.part[rows] > 0]
    return Places(later, {"part": program.columns.part[later] - 1})


def last(program: Program, rows: Ints) -> Places:
    """Return the place of the last exchange before each step."""
    owed = owed_by(program)
    if owed is None:
        return Places(rows[:0])
    return Places(rows, {"part": np.full(len(rows), owed.exchanges - 1, dtype=np.int64)})


# A step, and the instruction that runs its first part, read these.
STEP_READS = (
    Read("reduced_gradient", otherwise=Read("weight_gradient")),
    Read("island_sum", at=between_islands),
    Read("reduced_tied_gradient", at=tied),
    Read("gradient_norm", at=clipped),
    Read("loaded_states", at=stepped_from_host),
)

# The sums of a stage after each exchange.
VALUES.register(ValueKind(name="whole_sums", scope=(*PER_STAGE, "part"), until="read"))

TENSOR_NORMS = KINDS.register(
    Kind(
        name="tensor_norms",
        symbol="TN",
        stream="collective",
        reads=(*map(of_first, STEP_READS), Read("whole_sums", at=before)),
        writes=("whole_sums",),
        collective=True,
    )
)

USES = (AddedUses(kinds=("step",), reads=(Read("whole_sums", at=last),)),)
