"""Models whose layers form a graph: planned by what their stages wait for, and no longer as a chain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan_file import check_plan
from weft.moves.layout import build_plan, refuse
from weft.moves.layout_of_plan import layout_of
from weft.planning.compile import compile_folded, pipeline_layout
from weft.planning.planners import get_planner
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import problem_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict

PROBLEM = problem_of(model="own_models:diamond", on="4xa100-40gb", global_batch=32)
BOUNDS = Bounds(PROBLEM)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any cut of the layers in their order, with and without split micro-batches."""
    pp, count = draw(st.sampled_from([2, 4])), len(PROBLEM.job.graph.layers)
    borders = sorted(draw(st.permutations(range(1, count)))[: pp - 1])
    return Layout(
        pp=pp,
        dp=1,
        loops=1,
        micro_batch_size=draw(st.sampled_from([4, 8])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        layers_per_stage=tuple(end - start for start, end in pairwise([0, *borders, count])),
        splits=draw(st.sampled_from([(), (2,) * pp, (1, 2, 2, 4)[:pp]])),
    )


@given(layouts())
def test_no_step_is_shorter_than_its_bound(layout: Layout) -> None:
    job = PROBLEM.job
    assume(refuse(job, layout) is None)
    plan = build_plan(job, layout, BOUNDS.layer_seconds(layout))
    assert check_plan(plan, job.graph, job.cluster) == []
    prediction = predict(
        CostModel(graph=job.graph, cluster=job.cluster), plan, compile_folded(plan, job.graph, job.cluster)
    ).prediction
    assert prediction.step_s >= BOUNDS.step_s(layout) * (1 - 1e-6)
    # What split micro-batches keep is rounded to whole bytes each.
    assert BOUNDS.holding(layout).total <= max(prediction.peak_bytes) * (1 + 1e-4)
    assert layout_of(plan) == layout


def towers(splits: tuple[int, ...] = ()) -> Layout:
    return Layout(
        pp=4,
        dp=1,
        loops=1,
        micro_batch_size=8,
        schedule="1f1b",
        layers_per_stage=(1, 2, 2, 1),
        splits=splits,
    )


def test_towers_run_side_by_side() -> None:
    """The first micro-batch waits for one of the towers, not for one after the other."""
    plan = build_plan(PROBLEM.job, towers(), ())
    layout = pipeline_layout(plan, PROBLEM.job.graph)
    # What the stem gives goes to both towers and to the end, each once.
    assert layout.edges == ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3))
    [both] = {BOUNDS.stage_seconds(towers())[stage] for stage in (1, 2)}
    stem, _, _, head = BOUNDS.stage_seconds(towers())
    assert BOUNDS.step_s(towers()) == pytest.approx(max(4 * head + stem + both, 4 * both + stem, 4 * stem))


def test_stages_that_split_send_as_much_in_more_messages() -> None:
    whole, split = (
        pipeline_layout(build_plan(PROBLEM.job, towers(splits), ()), PROBLEM.job.graph)
        for splits in ((), (1, 2, 4, 1))
    )
    assert split.splits.tolist() == [1, 2, 4, 1]
    for (producer, consumer), size in whole.message_bytes.items():
        finer = max(split.stages[producer].splits, split.stages[consumer].splits)
        assert split.message_bytes[producer, consumer] * finer == size


def test_planners_search_what_is_no_chain_and_keep_pinned_splits() -> None:
    pinned = replace(PROBLEM, pins=PartialLayout(pp=4, splits=(1, 2, 2, 1)))
    fitting = get_planner("weft").search(pinned).fitting
    assert fitting
    assert {one.layout.splits for one in fitting} == {(1, 2, 2, 1)}
    assert [stage.splits for stage in fitting[0].plan.stages] == [1, 2, 2, 1]


def test_splits_that_do_not_divide_are_refused() -> None:
    job = PROBLEM.job
    assert refuse(job, towers((1, 3, 3, 1))) == (
        "micro-batches of 8 samples cannot be split in 3; nearest splits: 2"
    )
    assert refuse(job, towers((1, 2))) == "splits of 2 stages are given, pp x loops = 4 stages"
    plan = build_plan(job, towers(), ())
    odd = plan.stages[1].model_copy(update={"splits": 3})
    stages = (plan.stages[0], odd, *plan.stages[2:])
    [problem] = check_plan(plan.model_copy(update={"stages": stages}), job.graph, job.cluster)
    assert str(problem) == (
        "plan: stages[1].splits: 3 does not divide micro_batch_size = 8 (nearest valid: 2)"
    )
