"""`[sync] method = "auto"`: the methods that a goal's contract admits, on the best layouts of a dense search.

The search goes over dense layouts alone, once. Methods then get its fastest layouts. They also get the
fastest layout of each mesh with the least lower bounds of a step. These bounds leave communication out, and
no method has a shorter step than its bound. So they find the meshes that slow links held back. Where the
search pruned these by their links, that bound stands for their step. Methods get a
layout with its own sharding and with the least that they take. One that is too big recomputes more. Where no
layout fits a method, those that the search pruned follow. They cannot beat dense, but show the method's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from weft.describe.contract import Contract
from weft.describe.layout import Layout
from weft.describe.plan import AXES, RECOMPUTES, Choice
from weft.describe.run_file import RunFile
from weft.describe.run_tables.planning import SyncTable
from weft.describe.synchronisation import AUTO, DENSE, asked_options, proposals_of, steps_apart, sync_words
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.moves.registry import sync_contracts
from weft.moves.sharers import replicas_of
from weft.planning.goals import goal_of_step, goal_value, goal_words
from weft.planning.planners import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.planners.space import overlaps
from weft.planning.problem import Problem
from weft.planning.ties import EVEN, probability_faster
from weft.predict.cost.memory import SHARDINGS

# Layouts to try: the fastest of the search, and one of each of the meshes with the least bounds.
FASTEST, MESHES = 6, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised:
    """A synchronisation method with options, and its best layout.

    Attributes:
        sync: the method, and its options without those that follow from places.
        contract: its contract.
        candidate: the best one that fits, else the best too big one; None where the method refuses all.
        reason: why none fits; empty if one does.
    """

    sync: Choice
    contract: Contract
    candidate: Candidate | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        return not self.reason


def in_sync(run: RunFile, sync: Choice) -> RunFile:
    """Return the run file with its synchronisation decided."""
    table = SyncTable.model_validate({"method": sync.name, **asked_options(sync)})
    return run.model_copy(update={"sync": table})


def synchronised_in_each(
    ranking: Ranking, steps: int, asked: Choice | None = None
) -> tuple[Synchronised, ...]:
    """Return every synchronisation method with each of its proposals, best first, and refused ones last.

    `ranking` is that of a dense search in which something fits.
    `steps` are those of the run. `asked` is one more proposal.
    """
    problem, contracts = ranking.problem, sync_contracts()
    fastest = _fastest(ranking)
    search = _Tried(ranking, fastest)
    found = [Synchronised(sync=Choice(name=DENSE), contract=contracts[DENSE], candidate=fastest)]
    for name, contract in contracts.items():
        if name == DENSE:
            continue
        if contract > problem.contract:
            reason = f"goal.contract {problem.contract.word!r} keeps it out; it is {contract.word}"
            found.append(Synchronised(sync=Choice(name=name), contract=contract, reason=reason))
            continue
        proposals = [one for one in (asked,) if one is not None and one.name == name]
        proposals += [one for one in proposals_of(name, problem.job) if one not in proposals]
        for sync in proposals:
            if (steps_apart(sync) or 0) > steps:
                reason = f"replicas would never meet in the {steps} steps of the run"
                found.append(Synchronised(sync=sync, contract=contract, reason=reason))
            else:
                found.append(search.best(sync, contract))
    return tuple(sorted(found, key=lambda one: _order(problem, one.candidate, fastest)))


def merged(ranking: Ranking, found: Sequence[Synchronised]) -> Ranking:
    """Return the ranking with the best candidate of each method.

    Dense candidates keep their order, in which rules decide ties. A method comes before a dense candidate if
    it beats this one and all that follow.
    """
    problem = ranking.problem
    # The best comes first in `found`.
    each = {one.sync.name: one for one in reversed(found) if one.candidate is not None}
    others = [one for one in each.values() if one.sync.name != DENSE]
    if not others:
        return ranking
    dense, fastest = ranking.fitting, _fastest(ranking)
    least = list(accumulate((_value(problem, one) for one in reversed(dense)), min))
    placed = list(zip(reversed(least), dense, strict=True))
    placed += [
        (_standing(problem, one.candidate, fastest), one.candidate)
        for one in others
        if one.candidate and one.fits
    ]
    placed.sort(key=lambda pair: pair[0])
    too_big = [one.candidate for one in others if one.candidate is not None and not one.fits]
    rest = [one for one in ranking.candidates if one.verdict is not Verdict.FITS]
    return replace(ranking, candidates=(*(one for _, one in placed), *too_big, *rest))


def decided_sync(problem: Problem, found: Sequence[Synchronised]) -> Problem:
    """Return the problem with the best method of `found`, and a line on all of them."""
    sync, each = found[0].sync, {one.sync.name: one for one in reversed(found)}
    words = [f"{sync_words(one.sync)}: {_result(problem, one)}" for one in reversed(each.values())]
    line = f"{sync_words(sync)}, the best of {AUTO} ({'; '.join(words)})"
    job = replace(problem.job, sync_options=sync.options)
    return replace(problem, sync=sync.name, job=job, assumed={**problem.assumed, "sync": line})


def _result(problem: Problem, one: Synchronised) -> str:
    if not one.fits or one.candidate is None or one.candidate.prediction is None:
        return one.reason
    prediction = one.candidate.prediction
    return goal_words(problem, prediction, len(prediction.peak_bytes))


class _Tried:
    """The layouts on which methods are tried, and the dense step that they are compared with."""

    def __init__(self, ranking: Ranking, fastest: Candidate) -> None:
        self._problem, self._bounds = ranking.problem, Bounds(ranking.problem)
        self._dense_s = fastest.step_s
        pruned = [one for one in ranking.candidates if one.verdict is Verdict.PRUNED and _several(one)]
        pruned.sort(key=lambda one: one.bound_s or one.estimate_s or 0.0)
        self._pruned = [one.chain for one in pruned]
        self._layouts = self._of([one for one in ranking.fitting if _several(one)])

    def _of(self, fitting: Sequence[Candidate]) -> list[Layout]:
        # Links may have held back what computes faster than dense.
        held_back = (one for one in self._pruned if self._bounds.step_s(one) < self._dense_s)
        others = list(filter(self._bounds.may_fit, held_back))
        meshes: dict[tuple[int, ...], list[Layout]] = {}
        for layout in (*(one.chain for one in sorted(fitting, key=lambda one: one.step_s)), *others):
            meshes.setdefault(tuple(getattr(layout, axis) for axis in AXES), []).append(layout)
        least = {mesh: min(map(self._bounds.step_s, layouts)) for mesh, layouts in meshes.items()}
        fastest = (meshes[mesh][0] for mesh in sorted(meshes, key=least.__getitem__)[:MESHES])
        return [*[*(one.chain for one in fitting), *others][:FASTEST], *fastest]

    def best(self, sync: Choice, contract: Contract) -> Synchronised:
        """Return a method on the best of the layouts; where none fits, on the best of the pruned ones."""
        best, reason = self._best_of(self._layouts, sync)
        if best is not None and best.verdict is Verdict.TOO_BIG:
            roomier, _ = self._best_of(self._roomier(sync), sync)
            best = roomier if roomier is not None and roomier.verdict is Verdict.FITS else best
        if best is not None:
            reason = "" if best.verdict is Verdict.FITS else best.reason
            best = replace(best, reason=f"{best.reason}; {best.step_s / self._dense_s:.2f} of dense's step")
        return Synchronised(sync=sync, contract=contract, candidate=best, reason=reason)

    def _best_of(self, layouts: Sequence[Layout], sync: Choice) -> tuple[Candidate | None, str]:
        """Return the best candidate of the layouts with a method, or the reason why there is none."""
        best: Candidate | None = None
        reason, tried = "no layout of the search has several replicas", set[str]()
        for layout in layouts:
            legal, refused = self._legal(replace(layout, sync=sync.name, sync_options=sync.options))
            reason = refused or reason
            for asked in legal:
                if str(asked) in tried or not self._may_win(asked, best):
                    continue
                tried.add(str(asked))
                judged = self._judged(asked)
                if judged.prediction is None:
                    reason = judged.reason
                elif best is None or _order(self._problem, judged) < _order(self._problem, best):
                    best = judged
        return best, reason

    def _roomier(self, sync: Choice) -> list[Layout]:
        """Return the pruned layouts of least bounds that a method takes as they are and that may fit."""
        may_fit = (
            layout
            for layout in self._pruned
            if self._bounds.may_fit(layout)
            and self._admits(replace(layout, sync=sync.name, sync_options=sync.options))
        )
        return list(islice(may_fit, FASTEST))

    def _legal(self, layout: Layout) -> tuple[list[Layout], str]:
        """Return the layout with its own sharding and with the least that its method takes, or a reason."""
        others = (replace(layout, sharding=level, island=None) for level in SHARDINGS)
        try:
            own = [layout] if self._admits(layout) else []
            least = [one for one in others if self._admits(one)][:1]
            reason = "" if own or least else refuse(self._problem.job, layout)
        except InputError as error:
            return [], str(error.violations[0])
        return own + least, reason or ""

    def _admits(self, layout: Layout) -> bool:
        return self._problem.pins.admit(layout) and refuse(self._problem.job, layout) is None

    def _may_win(self, layout: Layout, best: Candidate | None) -> bool:
        if best is None or best.verdict is not Verdict.FITS or self._problem.minimise == "memory":
            return True
        bound = goal_of_step(self._problem, self._bounds.step_s(layout), layout.ranks)
        return bound < _value(self._problem, best)

    def _judged(self, layout: Layout) -> Candidate:
        """Return the layout simulated, with the least recomputation with which it fits, if it then does."""
        asked = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
        first = judged = simulated(self._problem, asked, self._bounds.layer_seconds(layout))
        for other in self._recomputing(layout):
            if judged.verdict is not Verdict.TOO_BIG:
                break
            asked = Candidate(layout=other, verdict=Verdict.PRUNED, reason="")
            judged = simulated(self._problem, asked, self._bounds.layer_seconds(other))
        return judged if judged.verdict is Verdict.FITS else first

    def _recomputing(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with more recomputation, the least first."""
        job = self._problem.job
        for word in RECOMPUTES[RECOMPUTES.index(layout.recompute) :] if overlaps(job.cluster) else ():
            other = layout.recomputing(word)
            if other != layout and (word != "selective" or job.graph.knows_products) and self._admits(other):
                yield other


def _several(candidate: Candidate) -> bool:
    """Return True if a candidate has several replicas of each stage."""
    return candidate.layout is not None and replicas_of(candidate.layout) > 1


def _value(problem: Problem, candidate: Candidate) -> float:
    assert candidate.prediction is not None, "the candidate was simulated"
    return goal_value(problem, candidate.prediction, candidate.plan.ranks if candidate.plan else 0)


def _fastest(ranking: Ranking) -> Candidate:
    """Return the fitting candidate with the least of what its problem minimises."""
    return min(ranking.fitting, key=lambda one: _value(ranking.problem, one))


def _standing(problem: Problem, candidate: Candidate, dense: Candidate) -> float:
    """Return the value of a candidate, or that of dense if its step is not likely to be shorter.

    A difference within the uncertainty of predictions is no reason to give up an exact gradient.
    """
    assert candidate.prediction is not None, "the candidate was simulated"
    assert dense.prediction is not None, "the candidate was simulated"
    value = _value(problem, candidate)
    if problem.minimise != "time" or probability_faster(candidate.prediction, dense.prediction) > EVEN:
        return value
    return max(value, _value(problem, dense))


def _order(
    problem: Problem, candidate: Candidate | None, dense: Candidate | None = None
) -> tuple[bool, bool, float, bool, float]:
    """Return a sort key: fitting ones first, then too big ones, each by what the problem minimises.

    `dense` comes before those that are not likely to beat it.
    """
    if candidate is None:
        return True, True, 0.0, True, 0.0
    value = _value(problem, candidate)
    standing = value if dense is None else _standing(problem, candidate, dense)
    return candidate.verdict is not Verdict.FITS, False, standing, candidate is not dense, value
