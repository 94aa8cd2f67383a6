"""The elimination of the layouts that cannot be among the best of a search.

Layouts take turns, the least lower bound first. In its first turn, a layout gets a tighter bound, which takes
longer. In its second turn it is simulated. Any turn may rule it out.

When time is minimised, a layout dominates variants that cannot be faster. A variant with more sharding
gathers and reduces at least as many bytes at least as often. Recomputing adds a pass. This does not hold from
zero-0 to zero-1. There, weights may be smaller than the gradients that they replace in the exchange, and
replicas step only their share. Nor does it hold between some kinds of sharding groups.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES, shared_out
from weft.describe.units import format_bytes, format_seconds
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.link_bounds import LinkBounds
from weft.planning.planners.simulated import COMPILED_AFTER_LAYOUTS, simulated, too_big
from weft.planning.problem import Problem
from weft.predict.engine import load_compiled_engine


@dataclass(slots=True, eq=False)
class _InDoubt:
    """A candidate, its greatest lower bound so far, and whether it fits by its simulation."""

    candidate: Candidate
    least: float
    fits: bool = False

    @property
    def chain(self) -> Layout:
        return self.candidate.chain

    @property
    def turn(self) -> tuple[float, float, str, str]:
        """The least bound comes first, then the shortest step, then the least sharding."""
        return self.least, self.candidate.bound_s, self.chain.sharding, str(self.chain)


class Elimination:
    """The candidates of one problem that may be among the best; as many as `finalists` stay."""

    def __init__(self, problem: Problem, bounds: Bounds, finalists: int) -> None:
        self._problem, self._bounds, self._finalists = problem, bounds, finalists
        self._memory, self._links = problem.minimise == "memory", LinkBounds(problem, bounds)
        # Variants of a layout that may fit.
        self._variants: dict[tuple[str, tuple[int, ...] | None], list[_InDoubt]] = defaultdict(list)
        # Sorted.
        self._reached: list[float] = []
        self._tried = 0

    @property
    def worst(self) -> float:
        """The worst of the best fitting layouts so far; infinite before there are enough."""
        return self._reached[self._finalists - 1] if len(self._reached) >= self._finalists else inf

    def least(self, candidate: Candidate) -> float:
        """Return the first lower bound of a candidate: of its step, or of its peak where memory counts."""
        return float(self._bounds.holding(candidate.chain).total) if self._memory else candidate.bound_s

    def decided(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield each candidate when it is pruned, too big or simulated."""
        doubts = [_InDoubt(one, self.least(one)) for one in candidates]
        queue = [(one.turn, place) for place, one in enumerate(doubts)]
        heapify(queue)
        while queue:
            _, place = heappop(queue)
            if (decided := self._decided(doubts[place])) is not None:
                yield decided
            else:
                heappush(queue, (doubts[place].turn, place))

    def _decided(self, one: _InDoubt) -> Candidate | None:
        """Return a candidate with its verdict, or None where its bound has risen."""
        candidate, worst = one.candidate, self.worst
        if one.least > worst:
            bound_s = candidate.bound_s if self._memory else one.least
            return replace(candidate, reason=self._above(one.least, worst), bound_s=bound_s)
        plain = replace(one.chain, sharding="zero-0").recomputing("none")
        # The words for an order of devices may be cut.
        variants = self._variants[str(plain), plain.rank_order]
        faster = [other for other in variants if self._dominates(other, one)]
        for other in faster:
            if other.fits:
                short = f"{shared_out(other.chain)}, recompute {other.chain.recompute_text}"
                return replace(candidate, reason=f"cannot beat the same layout with {short}, which fits")
        if one not in variants:
            if (least := max((other.least for other in faster), default=0.0)) > one.least:
                one.least = least
                return None
            self._tried += 1
            if self._tried == COMPILED_AFTER_LAYOUTS:
                load_compiled_engine()
            if (big := too_big(candidate, self._bounds)) is not None:
                return big
            variants.append(one)
            if not self._memory:
                one.least = max(one.least, self._links.step_s(one.chain))
                return None
        return self._simulated(one)

    def _simulated(self, one: _InDoubt) -> Candidate:
        answered = simulated(self._problem, one.candidate, self._bounds.layer_seconds(one.chain))
        if answered.verdict is Verdict.FITS:
            one.fits = True
            insort(self._reached, float(answered.peak_bytes) if self._memory else answered.step_s)
        return answered

    def _above(self, least: float, worst: float) -> str:
        if self._memory:
            holds = format_bytes(round(worst))
            return f"cannot hold less than {holds}: at least {format_bytes(round(least))}"
        return f"cannot beat {format_seconds(worst)}: at least {format_seconds(least)}"

    def _dominates(self, other: _InDoubt, one: _InDoubt) -> bool:
        """Return True if a variant of a layout cannot be faster; see the module's docstring."""
        layout, variant = other.chain, one.chain
        if other is one or self._problem.minimise != "time":
            return False
        if RECOMPUTES.index(layout.recompute) > RECOMPUTES.index(variant.recompute):
            return False
        if layout.sharding == "zero-0":
            return variant.sharding == "zero-0"
        return layout.sharding <= variant.sharding
