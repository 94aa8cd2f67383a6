"""The collectives of CSER, and the obligation of programs to run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.methods.cser.absences import Absences
from weft.program.kinds import KINDS, Kind
from weft.program.program import Owed

SYNCHRONISE_UPDATE, REJOIN, RESET_ERROR = (
    KINDS.register(
        Kind(
            name=name,
            symbol=symbol,
            stream="collective",
            reads=("weights",),
            writes=("weights",),
            collective=True,
            joins_replicas=True,
        )
    )
    for name, symbol in (("synchronise_update", "SU"), ("rejoin", "RJ"), ("reset_error", "RE"))
)


@dataclass(frozen=True, kw_only=True)
class ResetsErrors(Owed):
    """The obligation of every trained stage's replicas to average parts of updates and errors.

    Attributes:
        every: steps between two resets; 0: there are none.
        updates: True if replicas also average a part of the updates in each step.
        instead: True if a step with a reset averages nothing else.
        absences: the resets that replicas miss.
    """

    every: int
    updates: bool
    instead: bool = False
    absences: Absences = field(default_factory=Absences)

    @property
    def facts(self) -> Mapping[str, str]:
        resets = {"errors reset every": str(self.every)} if self.every else {}
        absent = {f"replica {one.replica}": str(one) for one in self.absences.missed}
        return {**resets, "updates synchronised": "every step" if self.updates else "never", **absent}

    @property
    def cycle(self) -> int:
        """The steps of the method's cycle."""
        return self.absences.cycle if self.absences.missed else self.every or 1

    def resets_after(self, step: int) -> bool:
        """Return True if errors are reset after this step."""
        return self.every > 0 and (step + 1) % self.every == 0

    def updates_after(self, step: int) -> bool:
        """Return True if updates are averaged after this step."""
        return self.updates and not (self.instead and self.resets_after(step))
