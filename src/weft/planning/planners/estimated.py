"""Rankings by a planner's own estimate: the best are simulated, and keep their order."""

from __future__ import annotations

from collections.abc import Sequence

from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.problem import Problem


def rank_by_estimate(
    problem: Problem, candidates: Sequence[Candidate], bounds: Bounds, finalists: int
) -> Ranking:
    """Simulate candidates, least `estimate_s` first, until so many fit.

    All keep the order of their estimates, equal ones that in which they come, whatever the simulator says.
    Those that stay `PRUNED` come after those that were simulated, refused ones last.
    """
    estimated = [one for one in candidates if one.estimate_s is not None]
    refused = [one for one in candidates if one.estimate_s is None]
    estimated.sort(key=lambda one: one.estimate_s or 0.0)
    judged: list[Candidate] = []
    fitting = 0
    for one in estimated:
        if fitting < finalists:
            one = simulated(problem, one, bounds.layer_seconds(one.chain))
            fitting += one.verdict is Verdict.FITS
        judged.append(one)
    judged.sort(key=lambda one: one.verdict is Verdict.REFUSED)
    return Ranking(problem=problem, candidates=(*judged, *refused))
