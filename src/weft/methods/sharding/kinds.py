"""The collectives and frees of sharding, their values, and the obligations of programs with sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.describe.plan import Sharding
from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places, is_stepped, stepped_on_rank
from weft.program.program import Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, Use, ValueKind

VALUES.register(ValueKind(name="gathered_weights", scope=PER_STAGE, until="read"))
VALUES.register(ValueKind(name="island_sum", scope=PER_STAGE, until="freed"))


def _followed(program: Program, rows: Ints) -> npt.NDArray[np.bool_]:
    """Return True where the rank exchanges another shard of the same stage next, among unlike replicas."""
    columns, after = program.columns, np.minimum(rows + 1, len(program.columns) - 1)
    alike = (getattr(columns, name)[rows] == getattr(columns, name)[after] for name in _OF_SHARDS)
    found: npt.NDArray[np.bool_] = np.logical_and.reduce([after > rows, *alike])
    return found


_OF_SHARDS = ("kind", "rank", "stage", "iteration")


def first_shards(program: Program, rows: Ints) -> Places:
    """Return the exchanges of shards that one of the rank's next shard follows."""
    return Places(rows[_followed(program, rows)])


def last_shards(program: Program, rows: Ints) -> Places:
    """Return the exchanges of a rank's last or only shard of a stage."""
    return Places(rows[~_followed(program, rows)])


GATHER = KINDS.register(
    Kind(
        name="gather",
        symbol="G",
        stream="collective",
        reads=("weights",),
        writes=(Use("gathered_weights", at=last_shards),),
        collective=True,
        joins_replicas=True,
    )
)
FREE = KINDS.register(
    Kind(
        name="free",
        symbol="f",
        stream="compute",
        reads=(Read("gathered_weights", waits="first", consumes=True),),
    )
)
REDUCE = KINDS.register(
    Kind(
        name="reduce",
        symbol="R",
        stream="collective",
        reads=(
            Read("weight_gradient", at=first_shards),
            Read("weight_gradient", at=last_shards, consumes=True),
        ),
        writes=("reduced_gradient",),
        collective=True,
        joins_replicas=True,
    )
)
REDUCE_ACROSS = KINDS.register(
    Kind(
        name="reduce_across",
        symbol="RA",
        stream="collective",
        reads=("reduced_gradient",),
        writes=("island_sum",),
        collective=True,
        joins_replicas=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class SharesOut(Owed):
    """The obligation of replicas to shard at a level, in `islands` islands."""

    level: Sharding
    islands: int = 1

    @property
    def facts(self) -> Mapping[str, str]:
        islands = {"islands": str(self.islands)} if self.islands > 1 else {}
        return {"sharding": self.level, **islands}


def _owed(program: Program) -> SharesOut | None:
    owed = program.obligations.methods.get("sharding")
    return owed if isinstance(owed, SharesOut) else None


def gathered(program: Program, rows: Ints) -> Places:
    """Return the rows of stages with sharded weights or steps; an evaluation steps none and gathers all."""
    return Places(rows[_is_gathered(program, rows)])


def kept_whole(program: Program, rows: Ints) -> Places:
    """Return the rows of stages with all weights on every replica."""
    return Places(rows[~_is_gathered(program, rows)])


def _is_gathered(program: Program, rows: Ints) -> npt.NDArray[np.bool_]:
    owed = _owed(program)
    if owed is None:
        return np.zeros(len(rows), dtype=np.bool_)
    if owed.level == "zero-3" or not len(program.obligations.step):
        return np.ones(len(rows), dtype=np.bool_)
    return is_stepped(program, rows)


def _of_islands(program: Program, rows: Ints) -> Ints:
    owed = _owed(program)
    return rows if owed is not None and owed.islands > 1 else rows[:0]


def between_islands(program: Program, rows: Ints) -> Places:
    """Return all rows in programs with several islands, else none."""
    return Places(_of_islands(program, rows))


def stepped_between_islands(program: Program, rows: Ints) -> Places:
    """Return each stage that the instruction's rank steps, in programs with several islands."""
    return stepped_on_rank(program, _of_islands(program, rows))


USES = (
    AddedUses(
        kinds=(
            "forward",
            "backward",
            "backward_input",
            "forward_segment",
            "backward_segment",
            "input_segment",
        ),
        reads=(
            Read("gathered_weights", at=gathered, waits="first"),
            # Weights that no replica shards may be gathered, too.
            Read(
                "gathered_weights",
                at=kept_whole,
                waits="first",
                otherwise=Read("weights", at=kept_whole),
            ),
        ),
    ),
    AddedUses(kinds=("step",), reads=(Read("island_sum", at=between_islands, consumes=True),)),
    AddedUses(kinds=("norm",), reads=(Read("island_sum", at=stepped_between_islands),)),
)
