"""The surely shorter one of two predicted steps, and the published rules for pairs without one.

Errors of predictions for one model on one machine are mostly shared. For example, a device slower than its
data sheet is slower in every plan. So measured over predicted steps count as log-normal. The spread makes the
plans' 90 % intervals. The correlation of two plans is the shared part of the variance (`Prediction.shared`).
It is fitted to residuals where plans of the model were measured on the cluster (`weft.predict.corrections`).
Otherwise it is an assumption, `SHARED`, which leaves to a plan alone sqrt(1 - 0.9) = 32 % of the spread.

The rules come from Hagemann et al. (arXiv 2311.05610), for large transformers on accelerators. Micro-batch
size 1 comes first. Tensor or pipeline ranks come before recomputation. Larger micro-batches come only when
less of both is impossible. Pipeline ranks come before tensor ranks at an equal product. Recomputation of
parts of layers comes before whole layers. Their rule to divide the tokens is no choice here: weft's tensor
ranks always do.
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
    """The standing of a candidate against the first one of its ranking.

    `probability_faster`: the probability that the first one's step is shorter, from 0 to 1. It is None for
    the first one itself and for candidates without a simulation. `text` is the standing in words.
    """

    probability_faster: float | None
    text: str


def probability_faster(one: Prediction, other: Prediction) -> float:
    """Return the probability that a step of `one` is shorter than one of `other`; see the module."""
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
    """Return True if the rules cover the problem: transformers on accelerators, planned for time."""
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
    """Return `rule_for` of two candidates; None where no layout expresses one of them."""
    if one.layout is None or other.layout is None:
        return None
    return rule_for(problem, one.layout, other.layout)


def _ways(layout: Layout) -> int:
    """Return the number of parts of the model."""
    return layout.tp * layout.pp


def break_ties(ranking: Ranking) -> Ranking:
    """Return the ranking with its tied head in the order of the rules.

    The head are the fitting candidates that the fastest beats with a probability below `EVEN`. All others
    keep their places. So do all of a planner with its own model, and all that the rules do not cover.
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
    """Return a sort key: by the rules one after the other, then by the shortest step that a rule compares."""
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
    """Return the standing of a candidate against the best fitting one, with the rule that prefers either."""
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
        overlap = _interval(best)[1] >= _interval(candidate)[0]
        # Intervals hold the error that all plans share, too.
        return Standing(chance, "slower: most of the error is shared" if overlap else "slower")
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
    """Return the rule that put the first one before a faster one, if any, in words."""
    fitting = ranking.fitting
    fastest = min(fitting, key=lambda one: one.step_s)
    if fastest.estimate_s is not None or fastest is fitting[0] or ranking.problem.minimise != "time":
        return ""
    rule = _rule(ranking.problem, fitting[0], fastest)
    return f"tied with a faster one: {rule}" if rule is not None else ""


def _interval(one: Candidate) -> tuple[float, float]:
    assert one.prediction is not None, "a fitting candidate was simulated"
    return one.prediction.step_low_s, one.prediction.step_high_s


def _chance(one: Candidate, other: Candidate) -> float:
    assert one.prediction is not None, "a fitting candidate was simulated"
    assert other.prediction is not None, "a fitting candidate was simulated"
    return probability_faster(one.prediction, other.prediction)
