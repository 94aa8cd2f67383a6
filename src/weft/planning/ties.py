"""Comparison of two predicted steps, and the published rules for steps too close to tell apart.

Predictions of one model on one machine share most of their error. A slow device is slow in every plan. So the
ratio of measured to predicted steps is taken as log-normal. Its spread comes from the plans' 90 % intervals.
The correlation of two plans is the shared part of the variance (`Prediction.shared`). It is fitted to
residuals of measured plans (`weft.predict.corrections`), else it is the assumption `SHARED`. This leaves to a
plan alone sqrt(1 - 0.9) = 32 % of the whole spread.

The rules come from Hagemann et al. (arXiv 2311.05610), for large transformers on accelerators. Prefer
micro-batch size 1, then tensor or pipeline ranks to recomputation. Take larger micro-batches only if less of
both is impossible. Prefer pipeline to tensor ranks at an equal product. If anything is recomputed, avoid
whole layers. Their rule to divide the tokens is no choice here: weft's tensor ranks always do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES
from weft.describe.prediction import Prediction
from weft.planning.planners import Candidate, Ranking
from weft.planning.problem import Problem
from weft.predict.corrections import spread_of

# Above the first one plan is surely faster; below the second neither is, and rules decide.
SURELY, EVEN = 0.95, 0.6
# Kernels of narrower models are too short for micro-batches of one sample.
NARROWEST = 2048
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Standing:
    """A candidate's standing against the first one of its ranking.

    `probability_faster` is the probability, from 0 to 1, that the first one's step is shorter. It is None for
    the first one itself, and without a simulation. `text` says it in words.
    """

    probability_faster: float | None
    text: str


def probability_faster(one: Prediction, other: Prediction) -> float:
    """Return the probability that a step of `one` is shorter than one of `other`, as the module describes."""
    first, second = _spread(one), _spread(other)
    shared = math.sqrt(one.shared * other.shared)
    variance = first**2 + second**2 - 2.0 * shared * first * second
    ahead = math.log(other.step_s / one.step_s)
    if variance <= 0.0:
        return 0.5 if ahead == 0.0 else float(ahead > 0.0)
    return _NORMAL.cdf(ahead / math.sqrt(variance))


def _spread(prediction: Prediction) -> float:
    """Return the standard deviation of the logarithm of a step."""
    return spread_of(prediction.step_low_s, prediction.step_high_s)


def rules_hold(problem: Problem) -> bool:
    """Return whether the rules speak of such a problem: transformers on accelerators, planned for time."""
    accelerators = not any(group.device.synchronous for group in problem.job.cluster.groups)
    return accelerators and problem.minimise == "time" and problem.model.convolutions is None


def rule_for(problem: Problem, one: Layout, other: Layout) -> str | None:
    """Return the rule that puts layout `one` before `other`, in a few words; None where no rule does."""
    if not rules_hold(problem):
        return None
    ways, other_ways = (_ways(layout) for layout in (one, other))
    if one.micro_batch_size != other.micro_batch_size and problem.model.hidden >= NARROWEST:
        if one.micro_batch_size > other.micro_batch_size:
            return None
        if one.micro_batch_size == 1:
            return "micro-batch size 1 first"
        return "larger micro-batches last"
    if one.recompute != other.recompute:
        if RECOMPUTES.index(one.recompute) > RECOMPUTES.index(other.recompute):
            return None
        if one.recompute == "selective":
            return "recompute parts of layers, not whole ones"
        return "more tp/pp instead of recomputation" if ways > other_ways else "no recomputation first"
    if ways == other_ways and one.tp < other.tp:
        return "pp rather than tp at an equal product"
    return None


def _rule(problem: Problem, one: Candidate, other: Candidate) -> str | None:
    """Return the same for candidates; None if one of them has no layout."""
    if one.layout is None or other.layout is None:
        return None
    return rule_for(problem, one.layout, other.layout)


def _ways(layout: Layout) -> int:
    """Into how many parts the model is divided."""
    return layout.tp * layout.pp


def break_ties(ranking: Ranking) -> Ranking:
    """Return the ranking with its close candidates at the head ordered by the rules.

    The fastest beats a close candidate with a probability below `EVEN`. All others keep their places. So do
    candidates of planners with their own model, and those without a rule.
    """
    fitting = ranking.fitting
    head = [one for one in fitting if _chance(fitting[0], one) < EVEN]
    own = any(one.estimate_s is not None for one in fitting)
    unsaid = any(one.layout is None for one in head)
    if own or unsaid or len(head) < 2 or not rules_hold(ranking.problem):
        return ranking
    tied = {id(one) for one in head}
    ordered = iter(sorted(head, key=lambda one: _key(ranking.problem, one, head)))
    candidates = tuple(next(ordered) if id(one) in tied else one for one in ranking.candidates)
    return replace(ranking, candidates=candidates)


def _key(problem: Problem, candidate: Candidate, head: list[Candidate]) -> tuple[float, ...]:
    """By the rules one after the other; between them by the shortest step of those that a rule compares."""
    alike = [one for one in head if _choices(problem, one) == _choices(problem, candidate)]
    steps = [one.step_s for one in alike]
    size, recompute, ways = _choices(problem, candidate)
    own_s = candidate.step_s
    return (size, recompute, min(steps), ways, candidate.chain.tp, own_s)


def _choices(problem: Problem, candidate: Candidate) -> tuple[int, int, int]:
    layout = candidate.chain
    size = layout.micro_batch_size if problem.model.hidden >= NARROWEST else 0
    return (size, RECOMPUTES.index(layout.recompute), _ways(layout))


def standing(ranking: Ranking, candidate: Candidate) -> Standing:
    """Return a candidate's standing against the best fitting one, and the rule for one of the two."""
    fitting = ranking.fitting
    if not fitting or candidate not in fitting:
        return Standing(None, "")
    best, problem = fitting[0], ranking.problem
    if candidate is best:
        return Standing(None, _why_first(ranking))
    chance = _chance(best, candidate)
    if problem.minimise != "time":
        return Standing(chance, "")
    if chance >= SURELY:
        return Standing(chance, "surely slower")
    text = f"probably slower ({chance:.0%})" if chance >= EVEN else "tied with the best"
    if chance <= 1.0 - EVEN:
        text = f"perhaps faster ({1.0 - chance:.0%})"
    for_best, against = (_rule(problem, *pair) for pair in ((best, candidate), (candidate, best)))
    if for_best is not None:
        text += f"; the rules prefer the best: {for_best}"
    elif against is not None:
        text += f"; the rules prefer this: {against}"
    return Standing(chance, text)


def _why_first(ranking: Ranking) -> str:
    """Return the rule that put the first one before a faster one, if any did."""
    fitting = ranking.fitting
    fastest = min(fitting, key=lambda one: one.step_s)
    if fastest.estimate_s is not None or fastest is fitting[0] or ranking.problem.minimise != "time":
        return ""
    rule = _rule(ranking.problem, fitting[0], fastest)
    return f"tied with a faster one: {rule}" if rule is not None else ""


def _chance(one: Candidate, other: Candidate) -> float:
    assert one.prediction is not None, "a fitting candidate was simulated"
    assert other.prediction is not None, "a fitting candidate was simulated"
    return probability_faster(one.prediction, other.prediction)
