"""Neighbours of a layout: the results of moves, for one of the purposes of planners.

The planner's improvement needs faster ones, the smallest change that fits smaller ones. Advice on free memory
needs larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.errors import InputError
from weft.moves.layout import build_plan
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Move, Purpose
from weft.moves.registry import moves_for
from weft.planning.problem import Problem

# Times of all layers, one weight each, for balancing the stages of a layout.
LayerSeconds = Callable[[Layout], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The layout after a move, in words; it may be illegal.

    `unsaid`: the reason why no layout can express it, for a move on plans; `layout` is then the old one.
    """

    move: Move
    words: str
    layout: Layout
    unsaid: str | None = None


def neighbours(
    problem: Problem, layout: Layout, purpose: Purpose, layer_seconds: LayerSeconds
) -> Iterator[Neighbour]:
    """Yield the results of moves within the goal's contract on a legal layout; pins do not count."""
    for move in moves_for(purpose, problem.contract):
        if move.edits is None:
            yield from _of_plan(problem, layout, move, layer_seconds)
        else:
            for edit in move.edits(problem.job, layout):
                yield Neighbour(move=move, words=edit.words, layout=edit.layout)


def _of_plan(
    problem: Problem, layout: Layout, move: Move, layer_seconds: LayerSeconds
) -> Iterator[Neighbour]:
    """Yield the result of a move that edits plans alone: at most one."""
    plan = build_plan(problem.job, layout, layer_seconds(layout))
    context = Context(plan=plan, graph=problem.job.graph, cluster=problem.job.cluster)
    if move.applies(context) is not None:
        return
    try:
        made = _said(problem, move.apply(context), layout.methods, layer_seconds)
    except InputError as error:
        unsaid = f"move {move.name!r}: {error.violations[0]}"
        yield Neighbour(move=move, words=move.name, layout=layout, unsaid=unsaid)
    else:
        yield Neighbour(move=move, words=move.name, layout=made)


def _said(problem: Problem, plan: Plan, methods: tuple[Choice, ...], layer_seconds: LayerSeconds) -> Layout:
    """Return the layout that expresses all of a plan; raise InputError when there is none."""
    layout = layout_of(plan)
    seconds = layer_seconds(layout)
    layout = replace(layout_of(plan, seconds), methods=methods)
    if build_plan(problem.job, layout, seconds).plan_id != plan.plan_id:
        raise InputError("it changes what no layout says")
    return layout
