"""The obligation of a program to do work beside its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.methods.bubble_filling.options import NAME
from weft.methods.bubble_filling.works import WorkRows
from weft.program.program import Owed, Program


@dataclass(frozen=True, kw_only=True)
class FillsBubbles(Owed):
    """The obligation of every stage to do all its work once in each of its windows.

    Attributes:
        steps: by stage, the steps of a window; the first one captures.
        items: by stage, what a window does.
    """

    steps: tuple[int, ...]
    items: tuple[tuple[WorkRows, ...], ...]

    @property
    def facts(self) -> Mapping[str, str]:
        return {"steps of a window": " ".join(map(str, self.steps))}


def owed_by(program: Program) -> FillsBubbles | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(NAME)
    return owed if isinstance(owed, FillsBubbles) else None
