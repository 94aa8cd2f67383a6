"""Laws of evaluation in bubbles: its places, its proof, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from filled_plans import fills, kfac, placed, predicted_step
from hypothesis import given, settings
from hypothesis import strategies as st
from program.mutations import moved, without_edge, without_row
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.describe.plan_file import check_plan
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.bubble_filling.options import options_of, read_step_places, step_places_text
from weft.methods.bubble_filling.works import with_options
from weft.methods.evaluate.kinds import (
    COPY_WEIGHTS,
    HELD_OUT_FORWARD,
    RECEIVE_HELD_OUT,
    SEND_HELD_OUT,
)
from weft.methods.evaluate.sizes import most_micro_batches, most_steps_of, pieces_of
from weft.planning.job_rules import refused_by_methods
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.program.kinds import STEP, is_any_of
from weft.program.verify import require_valid, verify

GPT = tiny(layers=4)
ROWS = (COPY_WEIGHTS, HELD_OUT_FORWARD, SEND_HELD_OUT, RECEIVE_HELD_OUT)
ORDERS = st.sampled_from(
    [
        ("gpipe", 2, 1, 4),
        ("1f1b", 2, 1, 4),
        ("1f1b", 4, 1, 8),
        ("breadth-first", 2, 2, 4),
        ("depth-first", 2, 2, 4),
        ("hybrid", 2, 2, 4),
        ("zb-h1", 4, 1, 6),
        ("zb-v", 2, 2, 4),
    ]
)


def plan_of(
    order: tuple[str, int, int, int], *, dp: int = 1, curvature: bool = False, **options: int
) -> Plan:
    schedule, pp, loops, micro_batches = order
    plan = make_plan(GPT, schedule=schedule, pp=pp, loops=loops, dp=dp, micro_batches=micro_batches)
    work = "evaluate,kfac" if curvature else "evaluate"
    bubbles = fills(**{"most_steps": 64, **options, "work": work})
    return plan.model_copy(update={"methods": (*([kfac(GPT)] if curvature else []), bubbles)})


@given(ORDERS, st.sampled_from([1, 2]), st.sampled_from([8, 32, 64]), st.booleans())
@settings(max_examples=25)
def test_evaluations_in_any_order_are_proved_and_leave_the_step_as_it_is(
    order: tuple[str, int, int, int], dp: int, most_steps: int, curvature: bool
) -> None:
    open_plan = plan_of(order, dp=dp, curvature=curvature, most_steps=most_steps)
    plan = placed(GPT, open_plan)
    program = make_program(GPT, plan)
    require_valid(program)
    columns, asked = program.columns, options_of(plan)
    pieces = pieces_of(plan, asked)
    assert pieces * most_steps_of(plan, asked) >= most_micro_batches(plan)
    for step in range(program.steps_per_cycle):
        for stage in range(len(plan.stages)):
            own = (columns.iteration == step) & (columns.stage == stage)
            assert (own & (columns.kind == COPY_WEIGHTS)).sum() == dp
            assert (own & (columns.kind == HELD_OUT_FORWARD)).sum() == dp * pieces
    # Without the rows it is the program of a plan that leaves everything open.
    if not curvature:
        bare, kept = make_program(GPT, open_plan), ~is_any_of(columns.kind, ROWS)
        for name in ("kind", "stage", "micro_batch", "rank", "replica", "part", "peer", "bytes"):
            assert np.array_equal(getattr(columns, name)[kept], getattr(bare.columns, name)), name


@pytest.mark.parametrize("order", [("gpipe", 4, 1, 8), ("1f1b", 4, 1, 8)])
def test_one_micro_batch_a_step_fits_into_bubbles(order: tuple[str, int, int, int]) -> None:
    open_plan = plan_of(order, most_steps=256)
    in_fp32 = open_plan.model_copy(update={"precision": "fp32"})
    _, before = predicted_step(GPT, in_fp32)
    program, after = predicted_step(GPT, placed(GPT, in_fp32))
    assert (program.columns.kind == HELD_OUT_FORWARD).sum() >= 4
    # The copy of the first stage has no bubble before its first pass, and takes some of another one.
    assert after.step_s <= before.step_s * 1.01


@given(ORDERS, st.data())
@settings(max_examples=20)
def test_the_verifier_misses_no_row_and_no_edge(
    order: tuple[str, int, int, int], data: st.DataObject
) -> None:
    program = make_program(GPT, placed(GPT, plan_of(order, dp=2)))
    columns, edges = program.columns, program.edges
    rows = np.flatnonzero(is_any_of(columns.kind, ROWS))
    assert verify(without_row(program, data.draw(st.sampled_from(rows.tolist()))))
    joins = is_any_of(columns.kind[edges.source], ROWS) | is_any_of(columns.kind[edges.target], ROWS)
    assert verify(without_edge(program, data.draw(st.sampled_from(np.flatnonzero(joins).tolist()))))


def test_copies_behind_a_step_and_passes_out_of_their_turn_are_found() -> None:
    program = make_program(GPT, placed(GPT, plan_of(("1f1b", 2, 1, 4))))
    columns = program.columns
    for rank in (0, 1):
        own = columns.rank == rank
        step = int(np.flatnonzero(own & (columns.kind == STEP))[0])
        copy, *_ = np.flatnonzero(own & (columns.kind == COPY_WEIGHTS)).tolist()
        first, second, *_ = np.flatnonzero(own & (columns.kind == HELD_OUT_FORWARD)).tolist()
        assert copy < step
        words = "comes behind the step of its stage" if rank else "is not in its turn"
        assert any(words in str(one) for one in verify(moved(program, copy, step)))
        assert any("is not in its turn" in str(one) for one in verify(moved(program, first, second)))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("evaluate= 0 0", "does not place a work in 2 stages"),
        ("evaluate= 0 0; 0", "each stage has"),
        ("evaluate: 0", "does not place a work"),
    ],
)
def test_places_that_miss_work_are_refused(steps: str, words: str) -> None:
    plan = with_options(plan_of(("gpipe", 2, 1, 4)), steps=steps, windows="1:; 1:")
    with pytest.raises(InputError, match=words):
        make_program(GPT, plan)


def test_places_behind_no_computation_are_refused() -> None:
    plan = placed(GPT, plan_of(("gpipe", 2, 1, 4)))
    places = dict(read_step_places(options_of(plan).steps, 2))
    first, second = places["evaluate"]
    text = step_places_text({"evaluate": (first, (*second[:-1], 99))})
    with pytest.raises(InputError, match="behind computation 99 of"):
        make_program(GPT, with_options(plan, steps=text))


PLACES = st.dictionaries(
    st.sampled_from(["evaluate", "snapshot", "my-work"]),
    st.lists(st.lists(st.integers(-1, 99), max_size=4).map(tuple), min_size=2, max_size=2).map(tuple),
)


@given(PLACES)
def test_places_are_read_as_they_were_written(places: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    assert read_step_places(step_places_text(places), 2) == places


RUN = {
    "model": {"preset": "gpt-1m"},
    "cluster": {"use": "4xa100-80gb"},
    "train": {"global_batch": 16, "steps": 100, "evaluate_every": 20},
    "goal": {"contract": "empirical"},
    "plan": {"pp": 4, "schedule": "1f1b", "micro_batch_size": 2},
    "bubble": {"work": ["evaluate"]},
}


def planned(**tables: dict[str, object]) -> PlannedJob:
    return plan_run(parse_run({**RUN, **{key: {**RUN.get(key, {}), **more} for key, more in tables.items()}}))


def test_a_plan_says_what_it_does_and_its_price() -> None:
    job = planned()
    assert not refused_by_methods(job)
    assert not verify(job.program)
    assert not check_plan(job.plan, job.problem.job.graph, job.problem.job.cluster)
    held = [{one.name: one.value for one in job.memory_parts(rank)} for rank in range(4)]
    for one in held:
        assert one["weights that are evaluated"] == one["weights"]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"evaluate_every": None}, "train.evaluate_every: is left out, so no held-out losses fill bubbles"),
        ({"evaluate_every": 5}, "5; an evaluation in bubbles takes 16 steps (nearest valid: 16)"),
        ({"evaluate_every": 90}, "90; an evaluation of 16 steps behind it ends after the last of 100"),
        ({"steps": 31}, "train.steps: 31; an evaluation in bubbles takes 16 of them, behind as many others"),
        ({"compile": True}, "train.compile: compiled stages are not copied"),
    ],
)
def test_runs_that_bubbles_cannot_evaluate_are_refused_in_one_line(
    train: dict[str, object], words: str
) -> None:
    [problem] = refused_by_methods(planned(train=train))
    assert words in str(problem)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"plan": {"pp": 2, "tp": 2}}, "evaluate: tp: 2 ranks divide a replica"),
        ({"plan": {"pp": 2, "dp": 2, "sharding": "zero-1"}}, "evaluate: sharding: zero-1"),
        ({"plan": {"pp": 1, "dp": 4, "schedule": None}}, "one device of a pipeline waits for no other"),
        ({"plan": {"schedule": "chimera"}}, "two pipelines share the bubbles of 'evaluate'"),
        ({"bubble": {"work": ["evaluated"]}}, "nearest valid: evaluate"),
    ],
)
def test_layouts_without_whole_copies_are_refused(tables: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        planned(**tables)
