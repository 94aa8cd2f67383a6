"""What moves of other packages make of a plan, as candidates for planners."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.moves.layout import build_plan
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Move
from weft.moves.registry import installed_moves
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import Problem


def moved(problem: Problem, start: Layout, plan: Plan, bounds: Bounds) -> Iterator[tuple[Move, Candidate]]:
    """Each move that applies within the goal's contract to a layout's plan, and the layout that it makes.

    Candidates are `PRUNED` until they are judged, or `REFUSED` where no layout says what the move makes: then
    their layout is the one that it started from.
    """
    context = Context(plan=plan, graph=problem.job.graph, cluster=problem.job.cluster)
    for move in installed_moves():
        if move.contract > problem.contract or move.applies(context) is not None:
            continue
        try:
            layout = _said(problem, move.apply(context), bounds)
        except InputError as error:
            reason = f"move {move.name!r}: {error.violations[0]}"
            yield move, Candidate(layout=start, verdict=Verdict.REFUSED, reason=reason)
        else:
            yield move, Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")


def _said(problem: Problem, plan: Plan, bounds: Bounds) -> Layout:
    """The layout that says all of a plan.

    Raises:
        InputError: when there is none, or times of its layers are not known.
    """
    layout = layout_of(plan)
    layer_seconds = bounds.layer_seconds(layout)
    layout = layout_of(plan, layer_seconds)
    if build_plan(problem.job, layout, layer_seconds).plan_id != plan.plan_id:
        raise InputError("it changes what no layout says")
    return layout
