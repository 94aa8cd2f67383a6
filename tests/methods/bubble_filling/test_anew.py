"""Laws of work that is placed anew: within the margin nothing changes, beyond it no step becomes longer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.describe.plan_file import check_plan, parse_plan_file
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.bubble_filling.anew import CYCLES, PLACED_ANEW, STAYS, place_anew
from weft.methods.bubble_filling.drift import (
    Factors,
    InstructionPlace,
    factors_text,
    measured_factors,
    predicted_with,
    read_factors,
)
from weft.methods.bubble_filling.kinds import work_kinds
from weft.methods.bubble_filling.options import options_of, read_windows
from weft.methods.bubble_filling.report import REPORT
from weft.methods.bubble_filling.works import with_options
from weft.planning.elastic import refused_limits
from weft.planning.job_rules import refused_by_methods
from weft.planning.measured_changes import changes_of
from weft.planning.planned import changed_to, plan_run
from weft.planning.planned_job import Later, PlannedJob
from weft.program.kinds import KINDS, SEND_ACTIVATION, is_compute
from weft.program.verify import verify
from weft.timeline.timeline import Timeline
from weft.training.directory.event_words import event_words

RUN: dict[str, Any] = {
    "model": {"preset": "gpt-10m"},
    "train": {"global_batch": 16, "steps": 200, "evaluate_every": 40},
    "goal": {"contract": "empirical"},
    "kfac": {},
}
CELLS: dict[str, dict[str, Any]] = {
    "kfac and evaluate": {
        "cluster": {"use": "2xv100-16gb"},
        "plan": {"pp": 2, "schedule": "gpipe", "micro_batch_size": 4},
        "bubble": {"work": ["kfac", "evaluate"], "place_anew_every": 50},
    },
    "replicas": {
        "cluster": {"use": "4xv100-16gb"},
        "plan": {"pp": 2, "dp": 2, "schedule": "1f1b", "micro_batch_size": 2},
        "bubble": {"work": ["kfac"], "place_anew_every": 50},
    },
}
KINDS_OF_WORK = ("input_curvature", "output_curvature", "invert_input_curvature", "invert_output_curvature")


@cache
def job_of(cell: str) -> PlannedJob:
    return plan_run(parse_run({**RUN, **CELLS[cell]}))


def places(job: PlannedJob) -> list[InstructionPlace]:
    """Of passes and of K-FAC, on all ranks of all stages."""
    kinds = ("forward", "backward", *KINDS_OF_WORK)
    stages = ((stage, one.ranks[0]) for stage, each in enumerate(job.plan.stages) for one in each.replicas)
    return [InstructionPlace(kind, stage, rank) for kind, (stage, rank) in product(kinds, stages)]


def timeline_with(job: PlannedJob, factors: Factors) -> Timeline:
    """A cycle of the job in which instructions take these factors of their predicted times."""
    _, found = predicted_with(factors, job.problem.cost_model, job.problem.job.graph)(job.plan)
    return found.timeline


def factors_in(data: st.DataObject, job: PlannedJob, least: float, most: float) -> Factors:
    some = data.draw(st.lists(st.sampled_from(places(job)), min_size=1, max_size=12, unique=True))
    return {place: data.draw(st.floats(least, most)) for place in some}


@given(st.sampled_from(sorted(CELLS)), st.data())
@settings(max_examples=15)
def test_times_within_the_margin_change_nothing(cell: str, data: st.DataObject) -> None:
    job = job_of(cell)
    assert place_anew(job, timeline_with(job, factors_in(data, job, 0.96, 1.045))) is None


@given(st.sampled_from(sorted(CELLS)), st.data())
@settings(max_examples=12)
def test_work_placed_anew_is_whole_and_never_makes_the_step_longer(cell: str, data: st.DataObject) -> None:
    job = job_of(cell)
    measured = timeline_with(job, factors_in(data, job, 0.25, 4.0))
    found = place_anew(job, measured)
    if found is None:
        return
    assert event_words({"event": found.event, "step": 9, **found.words}) is not None
    if found.plan is None:
        assert found.event == STAYS
        return
    assert found.event == PLACED_ANEW
    anew = changed_to(job, found.plan, None)
    # Only places change, and the times for which they were found.
    open_plans = (with_options(one.plan, windows="auto", steps="auto", measured="") for one in (anew, job))
    assert len({one.plan_id for one in open_plans}) == 1
    assert not check_plan(anew.plan, job.problem.job.graph, job.problem.job.cluster)
    assert parse_plan_file(anew.plan.record()).plan == anew.plan
    assert not verify(anew.program)
    # Every piece of every item once in each window.
    windows, former = (
        [one.steps for one in read_windows(options_of(one.plan).windows)] for one in (anew, job)
    )
    for kind in KINDS_OF_WORK:
        for stage, steps in enumerate(windows):
            rows, before = (
                ((one.columns.kind == KINDS.code(kind)) & (one.columns.stage == stage)).sum()
                for one in (anew.program, job.program)
            )
            each = anew.program.steps_per_cycle // steps, job.program.steps_per_cycle // former[stage]
            assert rows * each[1] == before * each[0]
    # With the times that the plan states, the step is not longer than with the former places.
    predicted = predicted_with(
        read_factors(options_of(anew.plan).measured), job.problem.cost_model, job.problem.job.graph
    )
    was_s, now_s = (predicted(one.plan)[1].step_s for one in (job, anew))
    assert (was_s, now_s) == (found.words["former_step_s"], found.words["step_s"])
    assert now_s <= was_s
    assert now_s < was_s or sum(windows) < sum(former)
    # The same times again are those for which it is placed.
    again = read_factors(options_of(anew.plan).measured)
    assert place_anew(anew, timeline_with(anew, again)) is None


def test_times_that_come_back_bring_the_first_places_back() -> None:
    job = job_of("kfac and evaluate")
    slow = {place: 3.0 for place in places(job) if place.kind in ("forward", "backward")}
    found = place_anew(job, timeline_with(job, slow))
    assert found is not None
    assert found.plan is not None
    anew = changed_to(job, found.plan, None)
    assert sum(found.words["windows"]) < sum(one.steps for one in read_windows(options_of(job.plan).windows))
    factors = {place: round(one, 6) for place, one in read_factors(options_of(anew.plan).measured).items()}
    assert factors == pytest.approx(slow, rel=0.02)
    back = place_anew(anew, timeline_with(anew, {}))
    assert back is not None
    assert back.plan is not None
    assert back.plan == job.plan


def test_only_what_took_time_counts_and_messages_do_not() -> None:
    job = job_of("kfac and evaluate")
    predicted, kinds = job.predicted.simulation.timeline, work_kinds(job.plan, job.problem.job.graph)
    twice = 2 * predicted.end_ns - predicted.start_ns
    late = predicted.kind == SEND_ACTIVATION
    assert late.any()
    messages = replace(predicted, end_ns=np.where(late, twice, predicted.end_ns))
    assert not measured_factors(predicted, messages, kinds, 0.05, {})
    # Evaluations that are not due take no time. One of two steps has one, of twice the time.
    held_out = predicted.kind == KINDS.code("held_out_forward")
    due = held_out & (predicted.step == 0)
    idle = replace(
        predicted, end_ns=np.select([due, held_out], [twice, predicted.start_ns], predicted.end_ns)
    )
    found = measured_factors(predicted, idle, kinds, 0.05, {InstructionPlace("forward", 0, 0): 1.5})
    assert found.keys() == {InstructionPlace("held_out_forward", stage, stage) for stage in range(2)}
    assert set(found.values()) == {2.0}
    # What no step has keeps its former time.
    none = predicted.take(is_compute(predicted.kind) & (predicted.kind != KINDS.code("forward")))
    assert measured_factors(predicted, none, kinds, 0.05, {InstructionPlace("forward", 0, 0): 1.5}) == {
        InstructionPlace("forward", 0, 0): 1.5
    }


FACTORS = st.dictionaries(
    st.builds(
        InstructionPlace, st.sampled_from(["forward", "norm"]), st.integers(-1, 99), st.integers(0, 4096)
    ),
    st.floats(1e-6, 1e9),
)


@given(FACTORS)
def test_factors_come_back_from_a_plan_with_three_digits(factors: Factors) -> None:
    found = read_factors(factors_text(factors))
    assert found == pytest.approx(dict(factors), rel=5.1e-3)
    assert read_factors(factors_text(found)) == found


@pytest.mark.parametrize(
    "text", ["forward.0=1.5", "forward.0.0=0", "forward.0.0=nan", "forward.0.0=1e999", "x"]
)
def test_a_plan_with_other_factors_is_refused_in_one_line(text: str) -> None:
    job = job_of("replicas")
    plan = with_options(job.plan, measured=f"backward.0.0=2 {text}")
    [problem] = check_plan(plan, job.problem.job.graph, job.problem.job.cluster)
    assert "is no factor of the form kind.stage.rank=1.5" in str(problem)
    with pytest.raises(InputError):
        changed_to(job, plan, None)


def test_a_run_without_the_key_keeps_its_plan_and_a_run_too_short_for_it_is_refused() -> None:
    job = job_of("replicas")
    assert [one.key for one in changes_of(job.plan)] == ["bubble.place_anew_every"]
    assert not refused_by_methods(job)
    cycle = job.program.steps_per_cycle
    first = -(-max(50, (1 + CYCLES) * cycle) // cycle) * cycle
    short = replace(
        job, run=job.run.model_copy(update={"train": job.run.train.model_copy(update={"steps": first})})
    )
    [problem] = refused_by_methods(short)
    assert f"bubble.place_anew_every: 50; the first decision comes after {first} steps, of {first}" in str(
        problem
    )
    cell = {**CELLS["replicas"], "bubble": {"work": ["kfac"]}}
    without = plan_run(parse_run({**RUN, **cell}))
    assert not changes_of(without.plan)
    assert "place_anew_every" not in without.plan.method("bubble-filling").options
    assert options_of(without.plan).windows == options_of(job.plan).windows


def test_other_changes_of_the_plan_are_refused_in_one_line() -> None:
    job = job_of("replicas")
    [problem] = replace(job, later=Later(60, job)).misplaced
    assert str(problem) == (
        "plan.then: the run may change its plan by itself after every 50 steps "
        "(nearest valid: bubble.place_anew_every = 0)"
    )
    run = job.run.model_copy(update={"run": job.run.run.model_copy(update={"min_nodes": 1})})
    [problem] = refused_limits(replace(job, run=run))
    assert "bubble.place_anew_every changes the plan, too" in str(problem)


def test_the_report_tells_what_was_placed_anew_and_for_which_times() -> None:
    job, [section, _] = job_of("kfac and evaluate"), REPORT
    slow = {place: 3.0 for place in places(job) if place.kind in ("forward", "invert_input_curvature")}
    found = place_anew(job, timeline_with(job, slow))
    assert found is not None
    assert found.plan is not None
    anew = changed_to(job, found.plan, None)
    [(label, words)] = section.events(
        [{"event": "started"}, {"event": found.event, "step": 60, **found.words}]
    )
    assert label == "placed anew after 60 steps"
    assert "takes 3.0" in words
    assert "predicted step" in words
    rows = dict(section.rows(anew, []))
    assert "invert input curvature 3" in rows["placed for measured times, over predicted ones"]
    told = dict(section.measured(anew, timeline_with(anew, slow)))["invert input curvature, measured"]
    assert told == "3.00 times the predicted time"
    assert "weft corrections" not in told
