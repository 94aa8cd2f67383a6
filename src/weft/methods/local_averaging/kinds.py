"""The averaging instruction of a stage's replicas, and the obligation of programs to run it."""

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
    """The obligation of every trained stage's replicas to average its weights after `every` steps.

    Replica r takes `steps[r]` of them.
    """

    every: int
    steps: tuple[int, ...]

    @property
    def facts(self) -> Mapping[str, str]:
        own = {} if set(self.steps) == {self.every} else {"steps of replicas": " ".join(map(str, self.steps))}
        return {"weights averaged every": str(self.every), **own}
