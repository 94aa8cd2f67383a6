"""Laws of every planner: legal plans, the same answer twice, pins kept or refused, none beats all layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from installing import register

from weft.describe.cluster import Cluster
from weft.describe.layout import PartialLayout
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.planning.compile import compile_plan
from weft.planning.planners import PLANNERS, Ranking, Verdict, get_planner
from weft.planning.planners.baechi import PlacementPlanner
from weft.planning.planners.homogeneous import ExhaustivePlanner, RandomPlanner
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.verify import verify

CLOSED_FORM = ("amp", "megatron", "uniform", "annealing", "metis-form")
MIXED = "2xa100-80gb+2xt4"


def small(on: str = "4xa100-80gb", batch: int = 8, **pins: object) -> Problem:
    # Without the plainest states and order exhaustive has thousands of layouts.
    return problem_of(
        model="gpt-1m",
        on=on,
        global_batch=batch,
        precision="fp16",
        pins=PartialLayout(**{"sharding": "zero-0", "recompute": "none", "schedule": "1f1b", **pins}),  # type: ignore[arg-type]
    )


@cache
def searched(name: str, on: str) -> Ranking:
    """What a planner answers to `small(on)`."""
    return get_planner(name).search(small(on))


def best_s(ranking: Ranking) -> float:
    """The shortest simulated step that fits."""
    return min(one.step_s for one in ranking.fitting)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ("name = 'mine'", "planner: 'mine' is no planner: it has no space and no search"),
        ("name = 'amp'; space = search = None", "planner: two planners are called 'amp'"),
        (
            "name = 'mine'; space = None; search = list",
            "planner mine: search returns list, no Ranking",
        ),
    ],
)
def test_what_is_no_planner_is_refused_in_one_line(packages: Path, members: str, problem: str) -> None:
    (packages / "weft_other.py").write_text(f"class Mine:\n    {members}\n")
    register(packages, "weft-other", {"weft.planners": {"mine": "weft_other:Mine"}})
    with pytest.raises(InputError, match=f"^{problem}"):
        get_planner("mine").search(())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(PLANNERS))
@pytest.mark.parametrize("on", ["4xa100-80gb", MIXED])
def test_plans_are_legal_and_their_programs_verify(name: str, on: str) -> None:
    problem, ranking = small(on), searched(name, on)
    assert ranking.fitting
    assert all(candidate.reason for candidate in ranking.candidates)
    for candidate in ranking.fitting:
        assert candidate.plan is not None
        assert check_plan(candidate.plan, problem.job.graph, problem.job.cluster) == []
        assert verify(compile_plan(candidate.plan, problem.job.graph)) == []


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_a_planner_answers_the_same_twice(name: str) -> None:
    assert get_planner(name).search(small(MIXED)).candidates == searched(name, MIXED).candidates


@pytest.mark.parametrize("name", ["annealing", "metis-form", "random", "homogeneous"])
def test_unlike_replicas_are_priced_like_the_whole_program(name: str) -> None:
    problem = small("2xa100-80gb+2xt4+2xv100-16gb", 12, schedule=None)
    job = problem.job
    for candidate in get_planner(name).search(problem).fitting[:6]:
        plan, prediction = candidate.plan, candidate.prediction
        assert plan is not None
        assert prediction is not None
        whole = predict(
            CostModel(graph=job.graph, cluster=job.cluster), plan, compile_plan(plan, job.graph)
        ).prediction
        # Where pipelines leave their nodes over unlike links, one stands for the others' messages.
        assert prediction.step_s == pytest.approx(whole.step_s, rel=1e-2)
        assert prediction.peak_bytes == whole.peak_bytes


def split(cluster: Cluster) -> Cluster:
    """The same nodes in two groups."""
    (group,) = cluster.groups
    ones = tuple(replace(group, name=name, count=group.count // 2) for name in ("one", "other"))
    link = cluster.links[(group.name, group.name)]
    pairs = (("one", "one"), ("one", "other"), ("other", "other"))
    return replace(cluster, groups=ones, links=dict.fromkeys(pairs, link))


# Annealing draws other moves where there are more groups of nodes.
@pytest.mark.parametrize("name", sorted(set(PLANNERS) - {"annealing"}))
def test_equal_nodes_are_equal_however_they_are_grouped(name: str) -> None:
    # Few placements have as many devices as are pinned.
    planner = get_planner(name)
    problem = small("8xt4", pp=None if isinstance(planner, PlacementPlanner) else 4)
    apart = replace(problem, job=replace(problem.job, cluster=split(problem.job.cluster)))
    assert best_s(planner.search(apart)) == pytest.approx(best_s(planner.search(problem)), rel=1e-9)


@pytest.mark.parametrize("on", ["4xa100-80gb", MIXED])
def test_no_planner_of_the_same_space_beats_the_exhaustive_one(on: str) -> None:
    everything = best_s(searched("exhaustive", on))
    assert best_s(searched("homogeneous", on)) == everything
    assert best_s(searched("random", on)) >= everything


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_no_planner_beats_the_exhaustive_one_where_there_is_nothing_to_cut(name: str) -> None:
    # Closed forms also take sizes of micro-batches that are no powers of two; of 16 there are none.
    problem = small(batch=16, pp=1)
    found = best_s(get_planner(name).search(problem))
    assert found >= best_s(get_planner("exhaustive").search(problem)) * (1 - 1e-9)


def test_the_same_plan_is_the_same_step_whoever_finds_it() -> None:
    on = "4xa100-80gb"
    known = {one.plan.plan_id: one for one in searched("exhaustive", on).fitting if one.plan}
    shared = 0
    for name in CLOSED_FORM:
        for one in searched(name, on).fitting:
            assert one.plan is not None
            if (other := known.get(one.plan.plan_id)) is not None:
                shared += 1
                assert other.plan is not None
                assert one.prediction == other.prediction
    assert shared > 5


@pytest.mark.parametrize("name", CLOSED_FORM)
@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2, "sharding": "zero-1", "recompute": "full", "dp": 2},
        {"pp": 2, "micro_batch_size": 2, "schedule": "gpipe"},
        {"pp": 2, "dp": 1, "tp": 1},
    ],
)
def test_pins_are_kept(name: str, pins: dict[str, object]) -> None:
    ranking = get_planner(name).search(small(**pins))
    assert ranking.fitting
    for candidate in ranking.candidates:
        assert {pin: getattr(candidate.layout, pin) for pin in pins} == pins


@pytest.mark.parametrize("name", CLOSED_FORM)
@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (
            {"schedule": "zb-h1"},
            "plan.schedule: {} plans 1f1b and gpipe, not 'zb-h1' (nearest valid: 1f1b)",
        ),
        ({"loops": 2}, "plan.loops: {} gives each device one stage, not 2 (nearest valid: 1)"),
        (
            {"recompute": ("full", "none")},
            "plan.recompute: {} recomputes alike in all stages, not full, none (nearest valid: full)",
        ),
        ({"cp": 2}, "plan.cp: {} does not divide tokens over 2 ranks (nearest valid: 1)"),
    ],
)
def test_pins_that_a_closed_form_does_not_know_are_refused(
    name: str, pins: dict[str, object], expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        get_planner(name).search(small(**pins))
    assert str(caught.value) == expected.format(name)


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_closed_forms_know_no_memory_to_minimise(name: str) -> None:
    with pytest.raises(InputError, match=f"goal.minimise: {name} minimises time, not memory"):
        get_planner(name).search(replace(small(), minimise="memory"))


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_what_cannot_be_is_refused_and_says_why(name: str) -> None:
    ranking = get_planner(name).search(small(micro_batch_size=3))
    assert {one.verdict for one in ranking.candidates} == {Verdict.REFUSED}
    assert "global batch 8 is not a multiple" in ranking.candidates[0].reason
    ranking = get_planner(name).search(small("3xt4", tp=3))
    assert {one.verdict for one in ranking.candidates} == {Verdict.REFUSED}
    assert "tp 3 does not divide" in ranking.candidates[0].reason


def test_exhaustive_refuses_more_than_its_limit() -> None:
    count = len(list(ExhaustivePlanner().space(small())))
    assert len(ExhaustivePlanner(limit=count).search(small()).candidates) == count
    with pytest.raises(InputError) as caught:
        ExhaustivePlanner(limit=count - 1).search(small())
    assert str(caught.value) == (
        f"planner: exhaustive simulates {count - 1} layouts at most, here are {count}; pin more "
        "(nearest valid: homogeneous)"
    )


def test_random_trials_are_as_many_as_asked_for_and_depend_on_the_seed() -> None:
    problem = small(batch=32, schedule=None)
    drawn = {
        seed: {str(one.layout) for one in RandomPlanner(seed=seed, trials=6).search(problem).candidates}
        for seed in (0, 1)
    }
    assert {len(layouts) for layouts in drawn.values()} == {6}
    assert drawn[0] != drawn[1]
    more = RandomPlanner(seed=0, trials=9).search(problem).candidates
    assert drawn[0] < {str(one.layout) for one in more}


def test_where_nothing_fits_the_lowest_peak_is_closest() -> None:
    problem = problem_of(model="llama-13b", on="4xt4", global_batch=64)
    ranking = get_planner("weft").search(problem)
    assert ranking.fitting == []
    peaks = [one.peak_bytes for one in ranking.closest]
    known = [peak for peak in peaks if peak]
    assert known == sorted(known)
    assert peaks[: len(known)] == known
    assert len(known) > 0
    assert len(peaks) == len(ranking.candidates)
