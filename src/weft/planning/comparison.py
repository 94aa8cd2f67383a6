"""Several planners on one problem: the plan that each would run, judged by one simulator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.describe.prediction import Prediction
from weft.errors import InputError
from weft.planning.planners import Candidate, Planner, Ranking, Verdict
from weft.planning.problem import Problem
from weft.progress import CountedWork, ProgressReport, unwatched


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One planner's answer.

    Attributes:
        planner: its name.
        search_s: seconds of its search.
        candidate: its best candidate that fits; where none does, its best simulated one, else its first. None
            where it refused the problem or knows no layout.
        considered: the number of layouts that it judged.
        passed_over: the number of candidates before this one that do not fit.
        reason: the reason for the candidate's place, or for the lack of one.
        behind: the extra time of its step over the shortest fitting one of all planners, as a fraction; None
            where its candidate does not fit.
        candidates: all its candidates, in its order.
    """

    planner: str
    search_s: float
    candidate: Candidate | None
    considered: int
    reason: str
    passed_over: int = 0
    behind: float | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def fits(self) -> bool:
        return self.candidate is not None and self.candidate.verdict is Verdict.FITS

    @property
    def prediction(self) -> Prediction | None:
        """The simulator's prediction for the candidate, None where it was not simulated."""
        return self.candidate.prediction if self.candidate is not None else None

    @property
    def step_s(self) -> float | None:
        """Simulated seconds of the step, None without a simulation."""
        return self.prediction.step_s if self.prediction is not None else None


def compare_planners(
    problem: Problem, planners: Sequence[Planner], report: ProgressReport = unwatched
) -> tuple[Answer, ...]:
    """Ask each planner; plans that fit come first, the shortest simulated step before the others."""
    answers = []
    for planner in CountedWork(report, "comparing", len(planners), "planners").each(planners):
        began = time.perf_counter()
        try:
            ranking = planner.search(problem)
        except InputError as error:
            search_s, reason = time.perf_counter() - began, str(error.violations[0])
            answers.append(
                Answer(planner=planner.name, search_s=search_s, candidate=None, considered=0, reason=reason)
            )
            continue
        answers.append(_answer(planner.name, ranking, time.perf_counter() - began))
    best_s = min((one.step_s for one in answers if one.fits and one.step_s is not None), default=None)
    return tuple(sorted((_behind(one, best_s) for one in answers), key=_order))


def _answer(name: str, ranking: Ranking, search_s: float) -> Answer:
    candidates = ranking.candidates
    simulated = [one for one in candidates if one.plan is not None]
    chosen = next(iter([*ranking.fitting, *simulated, *candidates]), None)
    before = candidates[: candidates.index(chosen)] if chosen is not None else ()
    return Answer(
        planner=name,
        search_s=search_s,
        candidate=chosen,
        considered=len(candidates),
        reason="no layout satisfies the given degrees" if chosen is None else chosen.reason,
        passed_over=sum(one.verdict is Verdict.TOO_BIG for one in before),
        candidates=candidates,
    )


def _behind(answer: Answer, best_s: float | None) -> Answer:
    if best_s is None or answer.step_s is None or not answer.fits:
        return answer
    return replace(answer, behind=answer.step_s / best_s - 1.0)


def _order(answer: Answer) -> tuple[bool, float, str]:
    step_s = answer.step_s
    return (not answer.fits, float("inf") if step_s is None else step_s, answer.planner)
