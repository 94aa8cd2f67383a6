"""Several planners on one problem: sorted by what the simulator says, with whoever refuses at the end."""

from __future__ import annotations

from weft.describe.layout import PartialLayout
from weft.planning.comparison import compare_planners
from weft.planning.planners import Planner, get_planner
from weft.planning.problem import problem_of
from weft.progress import WorkDone


def named(*names: str) -> list[Planner]:
    return [get_planner(name) for name in names]


def test_the_best_plan_of_each_is_sorted_by_its_simulated_step() -> None:
    problem = problem_of(model="gpt-1m", on="4xa100-80gb+4xt4", global_batch=16, precision="fp16")
    told: list[WorkDone] = []
    answers = compare_planners(problem, named("exhaustive", "amp", "metis-form", "megatron"), told.append)
    assert [(one.done, one.total) for one in told] == [(done, 4) for done in range(5)]
    assert sorted(one.planner for one in answers) == ["amp", "exhaustive", "megatron", "metis-form"]
    assert answers[-1].planner == "exhaustive"
    assert "exhaustive simulates 2000 layouts at most" in answers[-1].reason
    assert not answers[-1].fits
    assert answers[-1].step_s is answers[-1].behind is answers[-1].candidate is None
    steps = [one.step_s for one in answers[:-1] if one.step_s is not None]
    assert steps == sorted(steps)
    assert [one.behind for one in answers[:-1]] == [step / steps[0] - 1.0 for step in steps]
    assert all(one.search_s > 0 for one in answers)
    for one in answers[:-1]:
        assert one.candidate == get_planner(one.planner).search(problem).fitting[0]


def test_what_does_not_fit_comes_last_and_how_much_was_passed_over_is_counted() -> None:
    problem = problem_of(model="llama-13b", on="8xa100-80gb", global_batch=8)
    answers = {one.planner: one for one in compare_planners(problem, named("amp", "megatron"))}
    assert answers["amp"].fits
    ranking = get_planner("amp").search(problem)
    assert ranking.candidates[answers["amp"].passed_over] == ranking.fitting[0]
    assert answers["amp"].passed_over > 0
    tight = problem_of(model="llama-13b", on="8xa100-80gb", global_batch=8, pins=PartialLayout(dp=8))
    (none,) = compare_planners(tight, named("amp"))
    assert not none.fits
    assert none.step_s is not None
    assert none.behind is None
    assert "more than its device has" in none.reason


def test_no_layout_at_all_is_an_answer() -> None:
    problem = problem_of(model="gpt-1m", on="4xa100-80gb", global_batch=8, pins=PartialLayout(dp=3))
    (answer,) = compare_planners(problem, named("amp"))
    assert answer.reason == "no layout satisfies the given degrees"
