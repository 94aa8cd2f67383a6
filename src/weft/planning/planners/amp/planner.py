"""The `amp` planner: AMP's strategies in AMP's order, with the simulator's predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

from weft.describe.layout import Layout
from weft.errors import InputError
from weft.moves.layout import pipeline_of, refuse
from weft.planning.planners.amp.formula import amp_strategy
from weft.planning.planners.amp.inputs import AmpInputs, Degrees, amp_inputs
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import empty_stage, estimated, rank_by_estimate
from weft.planning.planners.space import degree_layouts, require_closed_form, with_layers
from weft.planning.problem import Problem


@dataclass(frozen=True, slots=True)
class AmpPlanner:
    """Search by AMP's closed form; `finalists` is the least number of fitting strategies to simulate.

    The order is AMP's. AMP has no model of memory, so its best may not fit: the verdict is weft's.
    """

    name: ClassVar[str] = "amp"
    finalists: int = 8

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `degree_layouts`; a layout gets its stages when it is judged."""
        return degree_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Estimate every strategy, and simulate the best.

        Raises:
            InputError: for pins that AMP does not know.
        """
        require_closed_form(problem, self.name)
        tables = cache(partial(profiled, problem))
        judged = [_judged(problem, layout, tables) for layout in self.space(problem)]
        return rank_by_estimate(problem, judged, Bounds(problem), self.finalists)


def profiled(problem: Problem, tp: int) -> AmpInputs | str:
    """Return AMP's inputs at one tensor-parallel degree, or the reason why there are none."""
    for group in problem.job.cluster.groups:
        if group.devices % tp:
            nodes = f"the {group.devices} devices of a node of {group.name}"
            return f"tp {tp} does not divide {nodes}"
    try:
        return amp_inputs(problem, [tp])
    except InputError as error:
        # A profile without this degree refuses to guess.
        return str(error.violations[0])


def degrees_of_layout(problem: Problem, layout: Layout) -> Degrees:
    """Return the degrees of a layout of equal replicas."""
    return Degrees(
        layout.tp,
        layout.dp,
        layout.pp,
        layout.micro_batch_size,
        pipeline_of(problem.job, layout).micro_batches,
    )


def _judged(problem: Problem, layout: Layout, tables: Callable[[int], AmpInputs | str]) -> Candidate:
    refused = Candidate(layout=layout, verdict=Verdict.REFUSED, reason=refuse(problem.job, layout) or "")
    if refused.reason:
        return refused
    inputs = tables(layout.tp)
    if isinstance(inputs, str):
        return replace(refused, reason=inputs)
    strategy = amp_strategy(inputs, degrees_of_layout(problem, layout))
    if strategy is None:
        return empty_stage(layout)
    return estimated(with_layers(layout, strategy.layers_per_stage), strategy.seconds)
