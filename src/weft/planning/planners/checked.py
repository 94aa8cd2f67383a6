"""A planner of another package, whose members and answers are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.describe.layout import Layout
from weft.errors import InputError, Violation
from weft.planning.planners.base import Ranking
from weft.planning.problem import Problem


class CheckedPlanner:
    """An installed planner; what is no answer is refused with its name."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self.name = str(planner.name)

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return every layout that the planner would consider."""
        yield from self._planner.space(problem)

    def search(self, problem: Problem) -> Ranking:
        """Return the planner's ranking.

        Raises:
            InputError: when it returns something else.
        """
        found = self._planner.search(problem)
        if not isinstance(found, Ranking):
            returned = f"search returns {type(found).__name__}, no Ranking"
            raise InputError(Violation(f"planner {self.name}", returned))
        return found
