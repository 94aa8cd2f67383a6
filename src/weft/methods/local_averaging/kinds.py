"""What the replicas of a stage do together, and what programs owe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.program.kinds import KINDS, Kind
from weft.program.program import Owed

AVERAGE_WEIGHTS = KINDS.register(
    Kind(
        name="average_weights",
        symbol="AW",
        stream="collective",
        reads=("weights",),
        writes=("weights",),
        collective=True,
        joins_replicas=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class AveragesWeights(Owed):
    """The replicas of every trained stage average its weights after so many steps."""

    every: int

    @property
    def facts(self) -> Mapping[str, str]:
        return {"weights averaged every": str(self.every)}
