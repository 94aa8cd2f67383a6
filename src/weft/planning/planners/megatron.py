"""The `megatron` planner: the rules of thumb of Megatron-LM (Narayanan et al., arXiv 2104.04473, section 3).

It uses only as much model parallelism as memory requires: tensor ranks first, up to a node, then stages. All
other devices are replicas. Each stage gets an equal number of layers. The micro-batch size is swept with (b'
/ b + p - 1) (t_f(b) + t_b(b)). A replica has b' samples and p stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from weft.describe.layout import Layout
from weft.describe.units import format_seconds
from weft.errors import InputError
from weft.moves.layout import pipeline_of, refuse
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import rank_by_estimate, too_big
from weft.planning.planners.space import by_count, degree_layouts, require_closed_form
from weft.planning.problem import Problem


@dataclass(frozen=True, slots=True)
class MegatronPlanner:
    """The first degrees that fit, by the rules; their micro-batch sizes ranked by the formula."""

    name: ClassVar[str] = "megatron"

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return all degrees with layers divided by count, in the order in which the rules try them."""
        every = [by_count(problem, layout) for layout in degree_layouts(problem)]
        fewest = min((layout.pp for layout in every), default=1)

        def turn(layout: Layout) -> tuple[int, int]:
            more = layout.pp > fewest
            return layout.pp, -layout.tp if more else layout.tp

        return iter(sorted(every, key=turn))

    def search(self, problem: Problem) -> Ranking:
        """Try degrees until one fits by the memory model, and sweep its micro-batches.

        Raises:
            InputError: for pins that the rules do not know.
        """
        require_closed_form(problem, self.name)
        bounds = Bounds(problem)
        chosen: tuple[Candidate, ...] = ()
        others: list[Candidate] = []
        for _, sizes in groupby(self.space(problem), key=lambda layout: (layout.pp, layout.tp)):
            judged = _each_judged(problem, bounds, sizes, found=bool(chosen))
            ranking = rank_by_estimate(problem, judged, bounds, len(judged))
            if ranking.fitting:
                chosen = ranking.candidates
            else:
                others += ranking.candidates
        others.sort(key=lambda one: one.verdict is Verdict.REFUSED)
        return Ranking(problem=problem, candidates=(*chosen, *others))


def _each_judged(
    problem: Problem, bounds: Bounds, sizes: Iterable[Layout], *, found: bool
) -> list[Candidate]:
    """Judge layouts with rising micro-batch sizes; see `_judged`."""
    judged: list[Candidate] = []
    smaller: Candidate | None = None
    for layout in sizes:
        one = _judged(problem, bounds, layout, smaller, found=found)
        judged.append(one)
        smaller = smaller or (one if one.verdict is Verdict.TOO_BIG else None)
    return judged


def _judged(
    problem: Problem, bounds: Bounds, layout: Layout, smaller: Candidate | None, *, found: bool
) -> Candidate:
    """Estimate a candidate if its degrees are tried and it fits.

    `smaller`: the candidate with smaller micro-batches that is too big; `found`: smaller degrees fit already.
    """
    candidate = Candidate(layout=layout, verdict=Verdict.REFUSED, reason="")
    reason = refuse(problem.job, layout)
    if reason is not None:
        return replace(candidate, reason=reason)
    if found:
        return replace(candidate, verdict=Verdict.PRUNED, reason="less model parallelism fits")
    if smaller is not None:
        size = smaller.chain.micro_batch_size
        return replace(
            smaller, layout=layout, reason=f"too big with micro-batch size {size}: {smaller.reason}"
        )
    try:
        over = too_big(candidate, bounds)
    except InputError as error:
        return replace(candidate, reason=str(error.violations[0]))
    if over is not None:
        return over
    pipeline = pipeline_of(problem.job, layout)
    stages_s = bounds.stage_seconds(layout)
    estimate_s = (pipeline.micro_batches + pipeline.devices - 1) * max(stages_s)
    reason = f"the formula says {format_seconds(estimate_s)}"
    return replace(candidate, verdict=Verdict.PRUNED, reason=reason, estimate_s=estimate_s)
