"""Candidates of which no layout says what they are: their plans do. They are ranked and shown like others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cli.tables.candidates import candidate_record
from weft.planning.advice import advised, mapped
from weft.planning.planners import Candidate, Ranking, Verdict, get_planner
from weft.planning.problem import problem_of
from weft.planning.ties import break_ties


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    """The best two are tied, and no layout says the first."""
    problem = problem_of(model="gpt-1m", on="2xa100-80gb", global_batch=4, precision="fp16")
    first, second = get_planner("homogeneous").search(problem).fitting[:2]
    return Ranking(problem=problem, candidates=(replace(first, layout=None), second))


def test_its_plan_says_what_it_is(ranking: Ranking) -> None:
    unsaid = ranking.candidates[0]
    assert unsaid.plan is not None
    assert unsaid.words == unsaid.plan.words
    assert unsaid.words.startswith("pp ")
    assert Candidate(verdict=Verdict.REFUSED, reason="").words == "no layout"
    record = candidate_record(unsaid)
    assert (record["layout"], record["plan_id"]) == (unsaid.words, unsaid.plan.plan_id)
    assert "loops" not in record


def test_rules_for_layouts_do_not_speak_of_it(ranking: Ranking) -> None:
    assert break_ties(ranking) is ranking
    first, second = advised(ranking, 2)
    assert (first.standing.text, first.smallest_change) == ("", None)
    assert "rules" not in second.standing.text


def test_it_stands_on_the_map_where_it_was_simulated(ranking: Ranking) -> None:
    unsaid = ranking.candidates[0]
    assert mapped(ranking)[0].step_s == unsaid.step_s
    bounded = replace(unsaid, plan=None, prediction=None, verdict=Verdict.PRUNED, bound_s=1.0)
    assert mapped(replace(ranking, candidates=(bounded,))) == ()
