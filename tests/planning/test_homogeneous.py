"""The homogeneous planner: valid bounds, an answer for every layout, pins and memory kept, deterministic."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.planning.compile import compile_plan
from weft.planning.planners import Verdict, get_planner
from weft.planning.problem import Pins, problem_of
from weft.program.verify import verify

SEARCH = get_planner("homogeneous").search


def small_problem(devices=4, batch=8, **pins):
    return problem_of(model="gpt-1m", on=f"{devices}xa100-80gb", global_batch=batch, pins=Pins(**pins))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 4, 6, 12, 24]))
def test_every_layout_is_answered_for(devices, batch):
    problem = small_problem(devices, batch)
    ranking = SEARCH(problem)
    assert len(ranking.candidates) == len(list(get_planner("homogeneous").space(problem)))
    assert all(candidate.reason for candidate in ranking.candidates)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([8, 16, 32]))
def test_no_simulated_step_beats_its_bound(devices, batch):
    simulated = [c for c in SEARCH(small_problem(devices, batch)).candidates if c.plan is not None]
    assert simulated
    for candidate in simulated:
        assert candidate.plan.prediction.step_s >= candidate.bound_s * (1 - 1e-6)


def test_plans_are_legal_and_their_programs_verify():
    problem = small_problem(4, 16)
    for candidate in SEARCH(problem).fitting:
        assert check_plan(candidate.plan, problem.job.graph, problem.job.cluster) == []
        assert verify(compile_plan(candidate.plan, problem.job.graph)) == []


def test_the_best_comes_first_and_the_search_is_deterministic():
    problem = small_problem(8, 32)
    first, second = SEARCH(problem), SEARCH(problem)
    times = [candidate.plan.prediction.step_s for candidate in first.fitting]
    assert times == sorted(times)
    assert [c.plan and c.plan.plan_id for c in first.candidates] == [
        c.plan and c.plan.plan_id for c in second.candidates
    ]


def test_pins_are_kept():
    ranking = SEARCH(small_problem(4, 16, schedule="breadth-first", loops=2, pipeline_parallel=2))
    for candidate in ranking.candidates:
        layout = candidate.layout
        assert (layout.schedule, layout.loops, layout.pipeline_parallel) == ("breadth-first", 2, 2)


def test_split_backwards_are_only_planned_when_they_are_pinned():
    names = {candidate.layout.schedule for candidate in SEARCH(small_problem(4, 16)).candidates}
    assert names == {"gpipe", "1f1b", "depth-first", "breadth-first", "hybrid"}
    for name in ("zb-h1", "zb-v"):
        pinned = SEARCH(small_problem(4, 16, schedule=name))
        assert {candidate.layout.schedule for candidate in pinned.candidates} == {name}
        for candidate in pinned.fitting:
            assert candidate.plan.prediction.step_s >= candidate.bound_s * (1 - 1e-6)
    assert pinned.fitting


def test_folding_replicas_predicts_what_the_whole_program_predicts():
    problem = small_problem(4, 16, pipeline_parallel=2, data_parallel=2)
    from weft.predict.predict import predict

    for candidate in SEARCH(problem).fitting:
        whole = predict(
            candidate.plan,
            compile_plan(candidate.plan, problem.job.graph),
            problem.job.graph,
            problem.job.cluster,
        )
        assert whole.prediction.step_s == pytest.approx(candidate.plan.prediction.step_s, rel=1e-9)
        assert whole.prediction.peak_bytes == candidate.plan.prediction.peak_bytes


def test_a_model_that_fits_nowhere_is_too_big_by_a_stated_amount():
    problem = problem_of(model="llama-13b", on="2xt4", global_batch=4, precision="fp32")
    ranking = SEARCH(problem)
    assert not ranking.fitting
    assert ranking.candidates[0].verdict is Verdict.TOO_BIG
    assert "more than any device has" in ranking.candidates[0].reason


def test_less_memory_never_makes_more_layouts_fit():
    problem = problem_of(model="llama-7b", on="8xa100-80gb", global_batch=16)
    roomy = {str(candidate.layout) for candidate in SEARCH(problem).fitting}
    group = problem.job.cluster.groups[0]
    small = replace(group, device=replace(group.device, memory_bytes=group.device.memory_bytes // 2))
    cluster = replace(problem.job.cluster, groups=(small,))
    tight = SEARCH(replace(problem, job=replace(problem.job, cluster=cluster)))
    judged_roomy = {str(c.layout) for c in SEARCH(problem).candidates if c.verdict is Verdict.TOO_BIG}
    assert not judged_roomy & {str(candidate.layout) for candidate in tight.fitting}
    assert roomy


def test_an_unknown_schedule_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="nearest valid: breadth-first"):
        SEARCH(small_problem(4, 8, schedule="breadth-frist"))


def test_indivisible_degrees_say_why():
    ranking = SEARCH(small_problem(4, 6, pipeline_parallel=1, data_parallel=4))
    assert {candidate.verdict for candidate in ranking.candidates} <= {Verdict.REFUSED}
