"""Comparison of timelines."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import training_program
from small_plans import make_plan, make_program, tiny
from timeline.timelines import timeline_of, unit_durations

from weft.describe.plan import Choice
from weft.errors import InputError
from weft.methods.local_averaging.kinds import AVERAGE_WEIGHTS
from weft.program.program import Program
from weft.timeline.compare import Pair, compare
from weft.timeline.figures import makespan_s
from weft.timeline.medians import cycle_of, median_by, step_times_s, typical_step_s
from weft.timeline.timeline import TIMELINE_COLUMNS, Timeline


@pytest.fixture
def program() -> Program:
    return training_program("1f1b", 2, 2, (3,))


def test_a_timeline_equals_itself(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program, 100, 200))
    comparison = compare(timeline, replace(timeline, clock="monotonic"))
    assert comparison.step.error == 0.0
    assert comparison.matched == len(program)
    assert (comparison.only_predicted, comparison.only_measured) == (0, 0)
    assert {pair.error for pair in (*comparison.kinds, *comparison.stages, *comparison.waits)} == {0.0}


def test_medians_ignore_the_warm_up_and_a_late_step(program: Program) -> None:
    predicted = timeline_of(program, unit_durations(program, 100, 200))
    slow = {0: 10, 1: 10, 2: 10, 3: 10, 4: 10, 8: 50}
    base = unit_durations(program, 110, 220)
    measured = timeline_of(
        program, lambda row, step: base(row, step) * slow.get(step, 1), steps=12, clock="monotonic"
    )
    comparison = compare(predicted, measured)
    assert (comparison.steps, comparison.warm_up_steps) == (7, 5)
    assert comparison.step.error == pytest.approx(1 / 1.1 - 1)
    by_kind = {pair.kind: pair for pair in comparison.kinds}
    assert by_kind["forward"].error == pytest.approx(1 / 1.1 - 1)
    assert "(error -9.1%), median of 7 steps" in comparison.text()
    assert by_kind["forward"].instructions == 6
    assert by_kind["forward"].predicted_s == pytest.approx(100e-9)
    assert by_kind["forward"].measured_total_s == pytest.approx(660e-9)
    assert {(pair.stage, pair.kind) for pair in comparison.stages} >= {(0, "forward"), (1, "backward")}


def test_steps_that_differ_are_compared_by_whole_cycles() -> None:
    """Every third step is slower; a measured step has the instructions of its own place in the cycle only."""
    config = tiny(layers=2)
    plan = make_plan(config, dp=2, micro_batches=1)
    sync = Choice(name="local-averaging", options={"every": 3})
    program = make_program(config, plan.model_copy(update={"sync": sync}))
    iteration = program.columns.iteration
    base = unit_durations(program, 100, 200)
    costs = [
        base(row, 0) + 500 * (program.columns.kind[row] == AVERAGE_WEIGHTS) for row in range(len(program))
    ]
    cycles = timeline_of(program, lambda row, cycle: costs[row], steps=4, clock="monotonic")
    measured = replace(cycles, step=3 * cycles.step + iteration[cycles.position])
    order = np.lexsort((measured.position, measured.step))
    measured = replace(measured, **{name: getattr(measured, name)[order] for name in TIMELINE_COLUMNS})
    predicted = replace(measured.take(measured.step < 3), clock="predicted")
    assert (cycle_of(predicted), cycle_of(measured)) == (3, 3)
    for known in (measured, measured.take(measured.step < 7)):
        comparison = compare(predicted, known)
        assert (comparison.matched, comparison.only_predicted, comparison.only_measured) == (
            len(program),
            0,
            0,
        )
        assert {pair.error for pair in comparison.kinds} == {0.0}
        (averages,) = (pair for pair in comparison.kinds if pair.kind == "average_weights")
        assert averages.instructions == 2
        assert averages.predicted_total_s == pytest.approx(2 * averages.predicted_s / 3)
    assert "mean over a cycle of 3" in comparison.text()
    assert typical_step_s([3, 4, 5, 6, 7, 8], [1.0, 1.0, 4.0, 1.0, 1.0, 4.0], 3) == pytest.approx(2.0)


def test_the_slow_instruction_is_found(program: Program) -> None:
    base = unit_durations(program, 100, 200)
    slow = next(entry for entry in program.of_rank(1) if str(entry) == "B1.1")
    predicted = timeline_of(program, base)
    measured = timeline_of(
        program, lambda row, step: base(row, step) + 900 * (row == slow.position), steps=7, clock="monotonic"
    )
    comparison = compare(predicted, measured)
    worst = comparison.worst[0]
    assert (worst.id, worst.rank, worst.kind, worst.name) == (slow.id, 1, "backward", "B1.1")
    assert worst.measured_s - worst.predicted_s == pytest.approx(900e-9)
    # Rank 0 stands still while it waits for the gradient of the slow backward.
    waits = {pair.rank: pair.measured_s - pair.predicted_s for pair in comparison.waits}
    assert waits[0] == pytest.approx(900e-9)


def test_ranks_share_the_time_of_each_kind(program: Program) -> None:
    """The seconds of a kind are those of all ranks together, on both sides; the slow rank has more."""
    base = unit_durations(program, 100, 200)
    rank = program.columns.rank
    measured = timeline_of(
        program, lambda row, step: base(row, step) * (1 + 2 * int(rank[row])), steps=7, clock="monotonic"
    )
    comparison = compare(timeline_of(program, base), measured)
    for pair in comparison.kinds:
        own = [one for one in comparison.ranks if one.kind == pair.kind]
        assert sum(one.predicted_s for one in own) == pytest.approx(pair.predicted_total_s)
        assert sum(one.measured_s for one in own) == pytest.approx(pair.measured_total_s)
    forwards = {one.rank: one.measured_s for one in comparison.ranks if one.kind == "forward"}
    assert forwards == pytest.approx({0: 300e-9, 1: 900e-9})


def test_waits_are_the_bubble_between_a_ranks_instructions(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program, 100, 200))
    waits = {pair.rank: pair.predicted_s for pair in compare(timeline, timeline).waits}
    # Rank 0 spans the whole step, (3 + 1) * 300 ns, of which it computes 900; rank 1 never waits in between.
    assert waits == pytest.approx({0: 300e-9, 1: 0.0})


def test_a_steady_step_is_as_long_as_its_busiest_rank(program: Program) -> None:
    """Without anything between the steps, the first start of the next step says the same."""
    timeline = timeline_of(program, unit_durations(program, 100, 200), steps=4)
    assert step_times_s(timeline) == pytest.approx([1200e-9] * 4)


def test_time_between_steps_belongs_to_the_step(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program, 100, 200), steps=3)
    pause = timeline.step * 500
    paused = replace(timeline, start_ns=timeline.start_ns + pause, end_ns=timeline.end_ns + pause)
    assert step_times_s(paused) == pytest.approx([1700e-9, 1700e-9, 1200e-9])


def test_steps_that_do_not_follow_each_other_count_alone(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program, 100, 200), steps=3)
    rows = timeline.step != 1
    gappy = replace(timeline, **{column: getattr(timeline, column)[rows] for column in TIMELINE_COLUMNS})
    assert step_times_s(gappy) == pytest.approx([1200e-9, 1200e-9])


def test_a_short_run_counts_by_its_last_step(program: Program) -> None:
    base = unit_durations(program, 100, 200)
    measured = timeline_of(
        program, lambda row, step: base(row, step) * (3 - step), steps=3, clock="monotonic"
    )
    comparison = compare(timeline_of(program, base), measured)
    assert (comparison.steps, comparison.warm_up_steps) == (1, 2)
    assert comparison.step.error == pytest.approx(0.0)
    assert "median of 1 step after 2 warm-up steps" in comparison.text()


def test_two_runs_of_one_name_are_the_first_and_the_second(program: Program) -> None:
    run = timeline_of(program, unit_durations(program), steps=7, run="run", clock="monotonic")
    assert compare(run, run).labels == ("first", "second")


def test_two_runs_are_called_by_their_names(program: Program) -> None:
    one = timeline_of(program, unit_durations(program, 100, 200), steps=7, run="old", clock="monotonic")
    two = timeline_of(program, unit_durations(program, 50, 100), steps=7, run="new", clock="monotonic")
    comparison = compare(one, two)
    assert comparison.labels == ("old", "new")
    assert (comparison.step.change, comparison.step.error) == pytest.approx((-0.5, 1.0))
    assert (
        "step: old 1.20 us, new 600 ns (change -50.0%), median of 2 steps after 5 warm-up steps"
        in comparison.text()
    )
    record = comparison.record()
    assert record["change"] == pytest.approx(-0.5)
    assert "error" not in record


def test_instructions_of_one_side_only_are_counted(program: Program) -> None:
    longer = training_program("1f1b", 2, 2, (4,))
    one = timeline_of(program, unit_durations(program))
    two = timeline_of(longer, unit_durations(longer), clock="monotonic")
    comparison = compare(one, two)
    assert comparison.matched == len(program)
    assert comparison.only_predicted == 0
    assert comparison.only_measured == len(longer) - len(program)


def test_the_record_is_plain_json(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program, 100, 200))
    record = json.loads(json.dumps(compare(timeline, timeline).record()))
    assert record["predicted_step_s"] == pytest.approx(makespan_s(timeline))
    assert record["error"] == 0.0
    assert len(record["worst"][0]["id"]) == 16
    assert {row["kind"] for row in record["kinds"]} >= {"forward", "send_gradient"}


def test_time_where_none_was_measured_has_no_number_as_an_error(program: Program) -> None:
    predicted = timeline_of(program, lambda row, step: 10)
    measured = timeline_of(program, unit_durations(program, 100, 200), clock="monotonic")
    comparison = compare(predicted, measured)
    sends = next(pair for pair in comparison.kinds if pair.kind == "send_activation")
    assert sends.error == float("inf")
    line = next(line for line in comparison.text().splitlines() if line.startswith("send activation"))
    assert line.split()[-1] == "-"


def test_time_where_none_was_predicted_is_missed_whole(program: Program) -> None:
    predicted = timeline_of(program, unit_durations(program, 100, 200))
    measured = timeline_of(program, lambda row, step: 10, clock="monotonic")
    sends = next(pair for pair in compare(predicted, measured).kinds if pair.kind == "send_activation")
    assert (sends.error, sends.change) == (-1.0, float("inf"))


def test_a_step_that_is_known_better_is_taken_as_it_is(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program, 100, 200))
    known = Pair(predicted_s=2.0, measured_s=2.5)
    assert compare(timeline, timeline, step=known).record()["error"] == pytest.approx(-0.2)


def cut(timeline: Timeline, rows: int) -> Timeline:
    return replace(timeline, **{column: getattr(timeline, column)[:rows] for column in TIMELINE_COLUMNS})


def test_the_error_of_a_devices_clock_is_told(program: Program) -> None:
    exact = timeline_of(program, unit_durations(program))
    assert "clock" not in compare(exact, exact).text()
    measured = compare(exact, replace(exact, clock_error_ns=12_000))
    assert "a device's clock is known to 12" in measured.text()
    assert measured.record()["clock_error_ns"] == 12_000


def test_an_empty_timeline_is_refused(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program))
    with pytest.raises(InputError, match="the predicted timeline of 'run' is empty"):
        compare(cut(timeline, 0), timeline)


def test_timelines_without_a_common_instruction_are_refused(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program))
    with pytest.raises(InputError, match="no instruction is in both"):
        compare(timeline, replace(timeline, id=timeline.id + np.uint64(1)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), min_size=1))
def test_medians_by_key_are_numpys(rows: list[tuple[int, int]]) -> None:
    key, value = np.array(rows, dtype=np.int64).T
    keys, medians = median_by(key, value)
    assert keys.tolist() == sorted(set(key.tolist()))
    assert medians.tolist() == [float(np.median(value[key == entry])) for entry in keys]
