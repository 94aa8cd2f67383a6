"""Alternatives: each of another kind than the best plan and the others, and the best of its kind."""

from __future__ import annotations

import pytest

from weft.planning.alternatives import alternatives
from weft.planning.planners import Ranking, get_planner
from weft.planning.problem import problem_of
from weft.planning.ties import break_ties


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    problem = problem_of(model="gpt-10m", on="8xa100-80gb", global_batch=64)
    return break_ties(get_planner("weft").search(problem))


def kind(candidate):
    layout = candidate.layout
    return (
        layout.pp,
        layout.dp,
        layout.ep,
        layout.cp,
        layout.tp,
        layout.sharding,
        layout.recompute,
        layout.sync,
    )


def test_each_kind_appears_once_by_its_best_plan(ranking: Ranking) -> None:
    found = alternatives(ranking, 1000)
    kinds = [kind(ranking.fitting[0]), *(kind(one.candidate) for one in found)]
    assert len(set(kinds)) == len(kinds) > 3
    assert set(kinds) == {kind(one) for one in ranking.fitting}
    for one in found:
        first = next(other for other in ranking.fitting if kind(other) == kind(one.candidate))
        assert one.candidate is first
        assert one.changed


def test_alternatives_keep_the_order_of_the_ranking_and_compare_with_the_best(ranking: Ranking) -> None:
    found, best = alternatives(ranking, 3), ranking.fitting[0]
    assert len(found) == 3
    places = [ranking.fitting.index(one.candidate) for one in found]
    assert places == sorted(places)
    for one in found:
        assert one.slower_by == pytest.approx(one.candidate.step_s / best.step_s - 1)
        assert one.reason


def test_less_memory_is_a_reason(ranking: Ranking) -> None:
    best = ranking.fitting[0]
    for one in alternatives(ranking, 1000):
        saves = best.peak_bytes - one.candidate.peak_bytes > 0.05 * best.peak_bytes
        assert ("less memory" in one.reason) == saves
