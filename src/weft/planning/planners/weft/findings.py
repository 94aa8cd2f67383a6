"""Findings of a search of `weft`: the judged candidates, the best, and the layouts left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from weft.describe.layout import Layout
from weft.describe.loss_choice import WHOLE
from weft.describe.units import format_seconds
from weft.planning.goals import STEPS_PRICED, cost_of, goal_of_step
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.homogeneous import rank_key
from weft.planning.planners.part_clusters import unlike_devices
from weft.planning.problem import Problem

# Small changes of a layout are worth trying up to this multiple of the best step.
NEAR = 1.1
_Key = tuple[str, tuple[int, ...] | None]


class Findings:
    """Candidates of one problem. `tell` gets each better one, in words.

    Layouts are of two kinds on unlike devices: with one stage per device, or with several. Estimates and
    bounds are compared within a kind only.
    """

    def __init__(self, problem: Problem, tell: Callable[[str], None]) -> None:
        self._problem, self._tell = problem, tell
        self._judged: dict[_Key, Candidate] = {}
        self._unlike = unlike_devices(problem.job.cluster)
        self.left_out: list[Candidate] = []
        # By name, moves with a result that no layout can express; by their words, plans of stage graphs.
        self.unsaid: dict[str, Candidate] = {}
        self.best: Candidate | None = None
        # Of the best; a search asks about tens of thousands of layouts.
        self._least = inf

    def __len__(self) -> int:
        return len(self._judged)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """All kinds of layouts."""
        return (False, True) if self._unlike else (False,)

    def kind(self, layout: Layout) -> bool:
        """Return the kind of a layout: True with several stages per device, on unlike devices."""
        return self._unlike and layout.loops > 1

    def of(self, layout: Layout) -> Candidate | None:
        """Return the candidate of a layout, if it was judged."""
        return self._judged.get(_key(layout))

    def take(self, judged: Candidate) -> Candidate:
        """Keep a judged candidate, with its price where cost is minimised."""
        if self._problem.minimise == "cost" and judged.verdict is Verdict.FITS:
            assert judged.plan is not None, "a fitting candidate was simulated"
            cost = STEPS_PRICED * cost_of(self._problem.job.cluster, judged.step_s, judged.plan.ranks)
            judged = replace(judged, reason=f"{judged.reason}; {cost:.4g} per {STEPS_PRICED:,} steps")
        if judged.layout is None:
            # Of plans with the same words, the best says all.
            known = self.unsaid.get(judged.words, judged)
            self.unsaid[judged.words] = min(known, judged, key=rank_key(self._problem))
        else:
            self._judged.setdefault(_key(judged.layout), judged)
        if judged.verdict is Verdict.FITS and (self.best is None or self.better(judged, self.best)):
            self.best, self._least = judged, self._minimised(judged)
            self._tell(f"best so far: {format_seconds(judged.step_s)}, {judged.words}")
        return judged

    def better(self, one: Candidate, other: Candidate) -> bool:
        """Return True if the first of two fitting candidates has less of the minimised quantity."""
        return self._minimised(one) < self._minimised(other)

    def may_win(self, step_s: float, layout: Layout) -> bool:
        """Return True if a layout with this step would be better than the best."""
        return self.wins(goal_of_step(self._problem, step_s, layout.ranks))

    def wins(self, minimised: float) -> bool:
        """Return True if this is less of the minimised quantity than the best has."""
        return minimised < self._least

    def leaders(self) -> list[Candidate]:
        """Return the fastest of each kind near the best, among all that fit."""
        return self.near(one for one in self._judged.values() if one.verdict is Verdict.FITS)

    def near(self, fitting: Iterable[Candidate]) -> list[Candidate]:
        """Return the fastest candidate of each kind that is near the best, the best first."""
        fastest: dict[bool, Candidate] = {}
        for one in fitting:
            kind = self.kind(one.chain)
            if kind not in fastest or self.better(one, fastest[kind]):
                fastest[kind] = one
        if self.best is None:
            return []
        most = NEAR * self._least
        return sorted((one for one in fastest.values() if self._minimised(one) <= most), key=self._minimised)

    def too_big(self) -> list[Candidate]:
        """Return the candidates with all logits whose activations make them too big, least bounds first."""
        # Candidates that states alone make too big have no peak.
        every = (one for one in (*self._judged.values(), *self.left_out) if one.peak_bytes)
        found = (one for one in every if one.verdict is Verdict.TOO_BIG and one.chain.loss == WHOLE)
        return sorted(found, key=lambda one: one.bound_s)

    def ranking(self) -> Ranking:
        """Return all judged candidates, and the left-out ones that were not judged later."""
        others = (one for one in self.left_out if self.of(one.chain) is None)
        every = [*self._judged.values(), *others, *self.unsaid.values()]
        candidates = sorted(every, key=rank_key(self._problem))
        return Ranking(problem=self._problem, candidates=tuple(candidates))

    def _minimised(self, one: Candidate) -> float:
        assert one.plan is not None, "a fitting candidate was simulated"
        return goal_of_step(self._problem, one.step_s, one.plan.ranks)


def _key(layout: Layout) -> _Key:
    """Return the key of a layout; its words cut long orders of devices short."""
    return str(layout), layout.rank_order
