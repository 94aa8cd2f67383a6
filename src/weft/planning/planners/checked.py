"""A planner of another package, whose members and answers are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.describe.layout import Layout
from weft.errors import InputError, Violation
from weft.planning.planners.base import Ranking
from weft.planning.problem import Problem

_MEMBERS = ("name", "space", "search")


class CheckedPlanner:
    """An installed planner; what is no answer is refused with its name.

    Args:
        entry: the name of its entry point.

    Raises:
        InputError: when it lacks a member.
    """

    def __init__(self, entry: str, planner: Any) -> None:
        if missing := [member for member in _MEMBERS if not hasattr(planner, member)]:
            problem = f"{entry!r} is no planner: it has no {' and no '.join(missing)}"
            raise InputError(Violation("planner", problem))
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
