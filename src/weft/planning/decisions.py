"""Words for the decisions of methods about a plan, which follow its search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.bundles import parts
from weft.planning.planned_job import PlannedJob


@dataclass(frozen=True, kw_only=True)
class DecidedWords:
    """A method's words for its decisions; the method contributes them.

    Attributes:
        method: its name.
        words: returns what it has decided of a plan; None if nothing.
    """

    method: str
    words: Callable[[PlannedJob], str | None]


def decided_words(planned: PlannedJob) -> list[str]:
    """Return what methods have decided of the plan, by the names of the methods."""
    told = sorted(parts(DecidedWords), key=lambda one: one.method)
    return [words for one in told if (words := one.words(planned)) is not None]
