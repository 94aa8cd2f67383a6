"""The common half of planners whose stages stand in a row: their questions, and from rows to a ranking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.downsets import Question, Row
from weft.planning.planners.graph_costs import GraphCosts, graph_costs
from weft.planning.planners.graphpipe.plans import CHAIN_SCHEDULE, plan_of
from weft.planning.planners.graphpipe.questions import (
    degrees_of,
    least_layout,
    may_deal,
    require_partition,
    sizes_of,
    unlike_degrees,
)
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.simulated import judged_plan, prepare
from weft.planning.problem import Problem

# Rows of one size of micro-batches to simulate until one fits.
TRIES = 4
Find = Callable[[GraphCosts, list[Question]], list[Row] | str]


def ranked_rows(problem: Problem, name: str, find: Find, *, unlike: bool = False) -> Ranking:
    """Return the rows of a planner: for each size of micro-batches the first that fits, by its own model.

    Simulated steps rank the sizes. `find` answers questions, or tells why it has no plan. With `unlike` its
    stages may have unlike numbers of replicas. The first row whose stages are alike is simulated, too.

    Raises:
        InputError: for pins, goals and methods that a partition does not know.
    """
    require_partition(problem, name)
    least = least_layout(problem, CHAIN_SCHEDULE)
    reason = refuse(problem.job, least)
    found: list[Candidate] = []
    if reason is None:
        prepare(problem)
        rows = _rows(problem, find, unlike=unlike)
        if isinstance(rows, str):
            reason = rows
        else:
            tried: dict[object, Candidate] = {}
            for group in rows.values():
                for kind in (group, [*filter(_is_alike, group)]):
                    _try_to_fit(problem, kind, tried)
            found = [*tried.values()]
            reason = "no row of stages fits into the memory of the devices"
    if not found:
        refused = Candidate(layout=least, verdict=Verdict.REFUSED, reason=str(reason))
        return Ranking(problem=problem, candidates=(refused,))
    return Ranking(problem=problem, candidates=tuple(sorted(found, key=rank_key(problem))))


def _is_alike(row: Row) -> bool:
    """Return True if all stages of a row have equally many replicas."""
    return len({stage.replicas for stage in row.graph.stages}) == 1


def _rows(problem: Problem, find: Find, *, unlike: bool) -> dict[int, list[Row]] | str:
    """Return the rows by size of micro-batches, or the reason why there are none."""
    pins, found = problem.pins, defaultdict[int, list[Row]](list)
    sharding = _sharding(problem)
    # States that replicas share make costs of their own for each number of them.
    for _, group in groupby(degrees_of(problem), key=lambda one: sharding == "zero-0" or one):
        degrees = list(group)
        tp, dp = degrees[0]
        costs = graph_costs(problem, sizes_of(problem, pins.dp or 1), tp=tp, sharding=sharding, dp=dp)
        questions = [
            Question(size, costs.recomputes(size), (dp,), costs.devices if pins.pp is None else pins.pp * dp)
            for _, dp in degrees
            for size in sizes_of(problem, dp)
            if size in costs.sizes
        ]
        if unlike and may_deal(problem):
            questions += [
                Question(size, costs.recomputes(size), unlike_degrees(problem, costs, size), costs.devices)
                for size in costs.sizes
            ]
        rows = find(costs, questions)
        if isinstance(rows, str):
            return rows
        for row in rows:
            found[row.graph.micro_batch_size].append(row)
    return found


def _try_to_fit(problem: Problem, rows: list[Row], tried: dict[object, Candidate]) -> None:
    """Simulate rows up to the first that fits, the least seconds per sample first, and each plan once."""
    tp, sharding = problem.pins.tp or 1, _sharding(problem)
    for row in sorted(rows, key=lambda one: one.sample_s)[:TRIES]:
        try:
            plan = plan_of(problem, row.graph, tp=tp, sharding=sharding, in_a_row=True)
        except InputError as error:
            tried[id(row)] = Candidate(verdict=Verdict.REFUSED, reason=str(error.violations[0]))
            continue
        if plan.plan_id not in tried:
            tried[plan.plan_id] = judged_plan(problem, plan)
        if tried[plan.plan_id].verdict is Verdict.FITS:
            break


def _sharding(problem: Problem) -> Sharding:
    """Return the pinned sharding; the originals know none."""
    return problem.pins.sharding or "zero-0"
