"""The homogeneous planner: valid bounds, an answer for every layout, pins and memory kept, deterministic."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.describe.layout import PartialLayout
from weft.describe.plan_file import check_plan
from weft.errors import InputError
from weft.planning.compile import compile_plan
from weft.planning.planners import Verdict, get_planner
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.problem import problem_of
from weft.predict.cost.placed_plan import CostModel
from weft.program.verify import verify
from weft.progress import WorkDone

SEARCH = get_planner("homogeneous").search


def small_problem(devices=4, batch=8, **pins):
    return problem_of(
        model="gpt-1m", on=f"{devices}xa100-80gb", global_batch=batch, pins=PartialLayout(**pins)
    )


@settings(max_examples=15)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 4, 6, 8, 12, 16, 24, 32]))
def test_every_layout_is_answered_for_and_no_simulated_step_beats_its_bound(devices, batch):
    problem = small_problem(devices, batch)
    ranking = SEARCH(problem)
    assert len(ranking.candidates) == len(list(get_planner("homogeneous").space(problem)))
    assert all(candidate.reason for candidate in ranking.candidates)
    simulated = [candidate for candidate in ranking.candidates if candidate.plan is not None]
    assert simulated
    for candidate in simulated:
        assert candidate.step_s >= candidate.bound_s * (1 - 1e-6)


def test_plans_are_legal_and_their_programs_verify():
    problem = small_problem(4, 16)
    for candidate in SEARCH(problem).fitting:
        assert check_plan(candidate.plan, problem.job.graph, problem.job.cluster) == []
        assert verify(compile_plan(candidate.plan, problem.job.graph)) == []


def test_the_best_comes_first_and_the_search_is_deterministic():
    problem = small_problem(8, 32)
    first, second = SEARCH(problem), SEARCH(problem)
    times = [candidate.step_s for candidate in first.fitting]
    assert times == sorted(times)
    assert [c.plan and c.plan.plan_id for c in first.candidates] == [
        c.plan and c.plan.plan_id for c in second.candidates
    ]


def test_pins_are_kept():
    ranking = SEARCH(small_problem(4, 16, schedule="breadth-first", loops=2, pp=2))
    for candidate in ranking.candidates:
        layout = candidate.layout
        assert (layout.schedule, layout.loops, layout.pp) == ("breadth-first", 2, 2)


def test_an_order_with_split_backwards_keeps_its_bound_when_it_is_pinned():
    for name in ("zb-h1", "zb-v"):
        pinned = SEARCH(small_problem(4, 16, schedule=name))
        assert {candidate.layout.schedule for candidate in pinned.candidates} == {name}
        for candidate in pinned.fitting:
            assert candidate.step_s >= candidate.bound_s * (1 - 1e-6)
        assert pinned.fitting


def test_folding_replicas_predicts_what_the_whole_program_predicts():
    problem = small_problem(4, 16, pp=2, dp=2)
    from weft.predict.predict import predict

    for candidate in SEARCH(problem).fitting:
        whole = predict(
            CostModel(graph=problem.job.graph, cluster=problem.job.cluster),
            candidate.plan,
            compile_plan(candidate.plan, problem.job.graph),
        )
        assert whole.prediction.step_s == pytest.approx(candidate.step_s, rel=1e-9)
        assert whole.prediction.peak_bytes == candidate.prediction.peak_bytes


def test_a_model_that_fits_nowhere_is_too_big_by_a_stated_amount():
    problem = problem_of(model="llama-13b", on="2xt4", global_batch=4, precision="fp32")
    ranking = SEARCH(problem)
    assert not ranking.fitting
    assert ranking.candidates[0].verdict is Verdict.TOO_BIG
    assert "more than any device has" in ranking.candidates[0].reason


def test_what_does_not_fit_names_what_fills_the_memory():
    problem = problem_of(
        model="llama-7b",
        on="8xa100-40gb",
        global_batch=64,
        pins=PartialLayout(tp=1, recompute="none", schedule="gpipe", micro_batch_size=4),
    )
    reasons = {c.reason for c in SEARCH(problem).candidates if c.verdict is Verdict.TOO_BIG}
    assert any("states and buffers alone" in reason for reason in reasons)
    assert any("of activations beside" in reason for reason in reasons)


def test_tensor_ranks_or_recomputation_let_a_large_model_fit_small_devices():
    problem = problem_of(model="gpt-52b", on="64xv100-32gb", global_batch=32, precision="fp16")

    def fitting(**pins):
        return SEARCH(replace(problem, pins=PartialLayout(pp=8, **pins))).fitting

    assert not fitting(tp=1, sharding="zero-0")
    assert fitting(tp=8, sharding="zero-0", recompute="none")
    assert fitting(tp=4, sharding="zero-1", recompute="full")


def test_minimising_memory_finds_the_least_that_any_layout_holds():
    problem = replace(small_problem(4, 8, pp=2, tp=1, loops=1, micro_batch_size=1), minimise="memory")
    fitting = SEARCH(problem).fitting
    peaks = [candidate.peak_bytes for candidate in fitting]
    everything = HomogeneousPlanner(finalists=10**6).search(problem).fitting
    assert peaks == sorted(peaks)
    assert len(everything) > len(fitting)
    assert peaks[:8] == [candidate.peak_bytes for candidate in everything[:8]]


def test_an_order_that_waits_for_itself_is_refused_and_not_an_error():
    class Blocking(HomogeneousPlanner):
        def space(self, problem):
            for layout in super().space(problem):
                yield replace(layout, blocking=("messages",))

    pins = {"schedule": "breadth-first", "pp": 2, "dp": 1, "tp": 1}
    looped, plain = (
        Blocking().search(small_problem(2, 16, **pins, loops=loops, micro_batch_size=1)) for loops in (2, 1)
    )
    assert {candidate.verdict for candidate in looped.candidates} == {Verdict.REFUSED}
    assert "wait for each other" in looped.candidates[0].reason
    assert plain.fitting


def family(layout):
    return str(replace(layout, sharding="zero-0", recompute="none"))


@settings(max_examples=6)
@given(st.sampled_from(["1f1b", "breadth-first", "zb-h1"]), st.sampled_from([1, 2]), st.sampled_from([1, 4]))
def test_a_variant_skipped_for_one_that_fits_is_not_faster(schedule, tp, micro_batch_size):
    problem = small_problem(
        8,
        32,
        pp=2,
        loops=2 if schedule == "breadth-first" else 1,
        tp=tp,
        schedule=schedule,
        micro_batch_size=micro_batch_size,
    )
    ranking = SEARCH(problem)
    skipped = [c.layout for c in ranking.candidates if "the same layout with" in c.reason]
    assert skipped
    best = min(candidate.step_s for candidate in ranking.fitting)
    for layout in skipped:
        pins = problem.pins.replaced(sharding=layout.sharding, recompute=layout.recompute)
        (alone,) = SEARCH(replace(problem, pins=pins)).fitting
        assert family(alone.layout) == family(layout)
        assert alone.step_s >= best * (1 - 1e-9)


def test_pinned_recomputation_and_sharding_are_kept():
    ranking = SEARCH(small_problem(4, 16, recompute="full", sharding="zero-3", tp=2))
    assert ranking.fitting
    for candidate in ranking.candidates:
        layout = candidate.layout
        assert (layout.recompute, layout.sharding, layout.tp) == ("full", "zero-3", 2)


def test_less_memory_never_makes_more_layouts_fit():
    problem = problem_of(model="llama-7b", on="8xa100-80gb", global_batch=16)
    roomy = SEARCH(problem)
    group = problem.job.cluster.groups[0]
    small = replace(group, device=replace(group.device, memory_bytes=group.device.memory_bytes // 2))
    cluster = replace(problem.job.cluster, groups=(small,))
    tight = SEARCH(replace(problem, job=replace(problem.job, cluster=cluster)))
    too_big = {
        str(candidate.layout) for candidate in roomy.candidates if candidate.verdict is Verdict.TOO_BIG
    }
    assert not too_big & {str(candidate.layout) for candidate in tight.fitting}
    assert roomy.fitting


def test_an_unknown_schedule_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="nearest valid: breadth-first"):
        SEARCH(small_problem(4, 8, schedule="breadth-frist"))


def test_indivisible_degrees_say_why():
    ranking = SEARCH(small_problem(4, 6, pp=1, dp=4))
    assert {candidate.verdict for candidate in ranking.candidates} <= {Verdict.REFUSED}


def test_a_search_tells_how_many_layouts_have_bounds_and_are_decided() -> None:
    told: list[WorkDone] = []
    problem = problem_of(model="gpt2", on="8xa100-80gb", global_batch=16)
    ranking = HomogeneousPlanner(report=told.append).search(problem)
    bounded = [one for one in told if one.work == "bounded"]
    assert [one.done for one in bounded] == list(range(len(ranking.candidates) + 1))
    assert {one.total for one in bounded} == {len(ranking.candidates)}
    decided = told[len(bounded) :]
    assert {one.work for one in decided} == {"decided"}
    done, left = ([one.done for one in decided], [one.total - one.done for one in decided])
    assert done == sorted(set(done))
    # Doubts end: enough layouts fit, and the others have higher bounds.
    assert left[-1] <= left[0] < len(ranking.candidates)
    assert len(decided) > 1
