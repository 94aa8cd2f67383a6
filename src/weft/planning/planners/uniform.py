"""The `uniform` planner: all degrees, layers divided by count, best by simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.describe.layout import Layout
from weft.planning.planners.base import Ranking
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.planners.space import by_count, degree_layouts, require_closed_form
from weft.planning.problem import Problem


@dataclass(frozen=True)
class UniformPlanner(HomogeneousPlanner):
    """The homogeneous planner's search, over degrees alone and without balancing."""

    name: ClassVar[str] = "uniform"

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `degree_layouts`."""
        return (by_count(problem, layout) for layout in degree_layouts(problem))

    def search(self, problem: Problem) -> Ranking:
        """Simulate all layouts that no bound rules out.

        Raises:
            InputError: for pins that it does not know.
        """
        require_closed_form(problem, self.name)
        return super().search(problem)
