"""The one notch that makes a layout fit: a rejected layout's lack, and the cost of the change.

A notch is one move for less memory (`Purpose.SMALLER`). It halves the micro-batch, or doubles the tensor or
pipeline ranks at the cost of replicas. Or it adds recomputation, of all stages or of the first ones, or
sharding. Other packages may add moves. The smallest change is the fitting one with the shortest predicted
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.describe.layout import Layout
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.moves.move import Purpose
from weft.planning.neighbours import neighbours
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestChange:
    """A change of one notch in words, such as ``recompute none -> selective``, and the layout it leads to."""

    words: str
    candidate: Candidate

    @property
    def step_s(self) -> float:
        """The predicted step of the changed layout, in seconds."""
        return self.candidate.step_s


class SmallestChanges:
    """Finds smallest changes in one problem; `known` are candidates without need of another simulation."""

    def __init__(self, problem: Problem, known: Iterable[Candidate] = ()) -> None:
        self._problem = problem
        self._bounds = Bounds(problem)
        self._judged = {one.words: one for one in known if one.plan is not None}

    def of_candidate(self, candidate: Candidate) -> SmallestChange | None:
        """Return the smallest change of a too big candidate; None for others, or without a layout."""
        too_big = candidate.verdict is Verdict.TOO_BIG and candidate.layout is not None
        return self.of(candidate.chain) if too_big else None

    def of(self, layout: Layout) -> SmallestChange | None:
        """Return the smallest change of a layout that does not fit; None where no notch is enough."""
        best: SmallestChange | None = None
        for bound_s, words, changed in sorted(self._possible(layout), key=lambda one: one[0]):
            if best is not None and bound_s >= best.step_s:
                break
            judged = self._judge(changed)
            if judged.verdict is Verdict.FITS and (best is None or judged.step_s < best.step_s):
                best = SmallestChange(words=words, candidate=judged)
        return best

    def _possible(self, layout: Layout) -> Iterator[tuple[float, str, Layout]]:
        """Yield legal notches that the bounds of memory let pass, with the lower bounds of their steps."""
        for one in neighbours(self._problem, layout, Purpose.SMALLER, self._bounds.layer_seconds):
            if one.unsaid is not None or refuse(self._problem.job, one.layout) is not None:
                continue
            try:
                bound_s = self._bounds.step_s(one.layout)
            except InputError:
                continue  # a profile was not measured there
            if self._bounds.holding(one.layout).total <= self._bounds.largest_memory_bytes:
                yield bound_s, one.words, one.layout

    def _judge(self, layout: Layout) -> Candidate:
        key = str(layout)
        if key not in self._judged:
            asked = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
            self._judged[key] = simulated(self._problem, asked, self._bounds.layer_seconds(layout))
        return self._judged[key]
