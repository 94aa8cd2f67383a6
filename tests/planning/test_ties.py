"""Who is surely faster, and how rules order those of whom nobody is."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan import Plan
from weft.describe.prediction import SHARED, Prediction
from weft.planning.planners import Candidate, Ranking, Verdict, get_planner
from weft.planning.problem import Problem, problem_of
from weft.planning.ties import (
    EVEN,
    SURELY,
    break_ties,
    probability_faster,
    rule_for,
    rules_hold,
    standing,
)

LARGE = problem_of(model="llama-7b", on="8xa100-80gb", global_batch=32, precision="bf16")


def prediction(step_s: float, width: float = 0.3) -> Prediction:
    return Prediction(
        step_s=step_s,
        step_low_s=step_s * (1 - width),
        step_high_s=step_s * (1 + width),
        first_step_s=step_s,
        peak_bytes=(1,),
        source="test",
    )


def layout(micro_batch_size: int = 1, pp: int = 1, tp: int = 1, **more: object) -> Layout:
    return Layout(
        pp=pp,
        dp=8 // (pp * tp),
        tp=tp,
        loops=1,
        micro_batch_size=micro_batch_size,
        schedule="1f1b",
        **more,  # type: ignore[arg-type]
    )


def ranking(*rows: tuple[Layout, float], problem: Problem = LARGE, **more: object) -> Ranking:
    """Candidates with these predicted steps; the plan itself plays no part."""
    return Ranking(
        problem=problem, candidates=tuple(candidate(one, s, some_plan(), **more) for one, s in rows)
    )


@cache
def some_plan() -> Plan:
    problem = problem_of(model="gpt-1m", on="2xa100-80gb", global_batch=4, precision="fp16")
    plan = get_planner("uniform").search(problem).fitting[0].plan
    assert plan is not None
    return plan


def candidate(one: Layout, step_s: float, plan: Plan, **more: object) -> Candidate:
    return Candidate(
        layout=one,
        verdict=Verdict.FITS,
        reason="",
        plan=plan,
        prediction=prediction(step_s),
        **more,  # type: ignore[arg-type]
    )


positive = st.floats(1e-6, 1e4)
widths = st.floats(0.01, 0.6)


@given(one=positive, other=positive, width=widths, other_width=widths)
def test_one_of_two_is_faster(one: float, other: float, width: float, other_width: float) -> None:
    first, second = prediction(one, width), prediction(other, other_width)
    there, back = probability_faster(first, second), probability_faster(second, first)
    assert there + back == pytest.approx(1.0)
    assert (there >= 0.5) == (one <= other) or math.isclose(one, other)


@given(step_s=positive, ratio=st.floats(1.01, 3.0), width=widths)
def test_the_further_behind_and_the_narrower_the_surer(step_s: float, ratio: float, width: float) -> None:
    best = prediction(step_s, width)
    near = probability_faster(best, prediction(step_s * ratio, width))
    assert 0.5 < near <= probability_faster(best, prediction(step_s * ratio * 1.1, width))
    narrower = probability_faster(prediction(step_s, width / 2), prediction(step_s * ratio, width / 2))
    assert narrower >= near


@pytest.mark.parametrize("shared", [SHARED, 0.3, 0.0])
def test_it_is_how_often_correlated_errors_turn_the_order_round(shared: float) -> None:
    one, other = (prediction(step_s).model_copy(update={"shared": shared}) for step_s in (1.0, 1.06))
    sigma = math.log(1.3 / 0.7) / (2 * NormalDist().inv_cdf(0.95))
    errors = np.random.default_rng(7).multivariate_normal(
        [0, 0], sigma**2 * np.array([[1, shared], [shared, 1]]), 200_000
    )
    faster = (np.exp(errors[:, 0]) < 1.06 * np.exp(errors[:, 1])).mean()
    assert probability_faster(one, other) == pytest.approx(faster, abs=0.005)


def test_exact_predictions_are_sure() -> None:
    one, other = (prediction(step_s, 0.0) for step_s in (1.0, 1.001))
    assert probability_faster(one, other) == 1.0
    assert probability_faster(other, one) == 0.0
    assert probability_faster(one, one) == 0.5


RULES = [
    (layout(1), layout(4), "micro-batch size 1 first"),
    (layout(2), layout(4), "larger micro-batches last"),
    (layout(tp=2), layout(recompute="full"), "more tp/pp instead of recomputation"),
    (layout(pp=2), layout(pp=2, recompute="selective"), "no recomputation first"),
    (layout(recompute="selective"), layout(recompute="full"), "recompute parts of layers, not whole ones"),
    (layout(pp=4), layout(tp=4), "pp rather than tp at an equal product"),
]


@pytest.mark.parametrize(("one", "other", "rule"), RULES, ids=[rule for *_, rule in RULES])
def test_a_rule_speaks_for_one_of_two(one: Layout, other: Layout, rule: str) -> None:
    assert rule_for(LARGE, one, other) == rule
    assert rule_for(LARGE, other, one) is None
    first = break_ties(ranking((other, 1.0), (one, 1.001)))
    assert [item.layout for item in first.candidates] == [one, other]
    assert standing(first, first.candidates[0]).text == f"tied with a faster one: {rule}"
    assert (
        standing(first, first.candidates[1]).text == f"tied with the best; the rules prefer the best: {rule}"
    )


def test_rules_speak_of_no_other_pairs() -> None:
    assert rule_for(LARGE, layout(tp=2), layout(tp=4)) is None
    assert rule_for(LARGE, layout(sharding="zero-1"), layout()) is None
    narrow = problem_of(model="gpt2", on="8xa100-80gb", global_batch=32, precision="bf16")
    assert rule_for(narrow, layout(1), layout(4)) is None
    processors = problem_of(model="gpt-1m", on="this-machine", global_batch=8)
    assert not rules_hold(processors)
    assert not rules_hold(replace(LARGE, minimise="memory"))
    assert rule_for(processors, layout(1), layout(4)) is None


def test_what_is_behind_stays_where_it_is() -> None:
    rows = ranking((layout(4), 1.0), (layout(1), 1.05), (layout(1, pp=2), 2.0))
    assert break_ties(rows) == rows
    near, far = (standing(rows, one) for one in rows.candidates[1:])
    assert near.probability_faster is not None
    assert EVEN < near.probability_faster < SURELY
    assert near.text == (
        f"probably slower ({near.probability_faster:.0%}); the rules prefer this: micro-batch size 1 first"
    )
    assert far.text in ("slower", "slower: most of the error is shared")
    assert far.text.endswith("is shared") == (
        rows.candidates[0].prediction.step_high_s >= rows.candidates[2].prediction.step_low_s
    )
    assert standing(rows, rows.candidates[0]).text == ""


def test_a_planner_with_a_model_of_its_own_is_not_corrected() -> None:
    rows = ranking((layout(4), 1.0), (layout(1), 1.001), estimate_s=1.0)
    assert break_ties(rows) == rows
    slow_first = ranking((layout(4), 2.0), (layout(4, pp=2), 1.0), estimate_s=1.0)
    assert standing(slow_first, slow_first.candidates[1]).text == "perhaps faster (100%)"


@given(st.permutations(range(6)))
def test_the_order_of_ties_does_not_hang_on_the_order_before(order: list[int]) -> None:
    layouts = [layout(1), layout(2), layout(4), layout(1, pp=2), layout(1, tp=2), layout(1, recompute="full")]
    steps = [1.0 + 0.001 * place for place in range(6)]
    rows = ranking(*((layouts[place], steps[rank]) for rank, place in enumerate(order)))
    broken = [one.layout for one in break_ties(rows).candidates]
    assert broken[-1].micro_batch_size == 4
    assert broken[-2].micro_batch_size == 2
    assert broken[-3].recompute == "full"
    assert (
        break_ties(replace(rows, candidates=tuple(break_ties(rows).candidates))).fitting[0].layout
        == broken[0]
    )


def test_what_was_not_simulated_has_no_standing() -> None:
    problem = problem_of(
        model="llama-7b", on="8xa100-80gb", global_batch=32, precision="bf16", pins=PartialLayout(dp=8)
    )
    found = get_planner("uniform").search(problem)
    for one in found.candidates:
        if one.verdict is not Verdict.FITS:
            assert standing(found, one).text == ""
            assert standing(found, one).probability_faster is None
