"""Figures of timelines against the closed forms of pipeline schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import ring_layout, training_program
from timeline.timelines import timeline_of, unit_durations

from weft.program.build import build_evaluation_program
from weft.timeline.figures import (
    bubble_fraction,
    busy_by_kind,
    busy_fraction,
    busy_s,
    makespan_s,
    peak_in_flight,
)
from weft.timeline.timeline import Timeline


def bubble_overhead(timeline: Timeline) -> float:
    """Makespan over the busiest rank's computation without any wait, minus 1."""
    return makespan_s(timeline) / float(busy_s(timeline).max()) - 1.0


@settings(max_examples=25)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_bubble_of_one_stage_per_device(name: str, devices: int, micro_batches: int, forward: int) -> None:
    """Makespan (M + P - 1)(f + b), so the overhead is (P - 1) / M."""
    program = training_program(name, devices, devices, (micro_batches,))
    timeline = timeline_of(program, unit_durations(program, forward, 2 * forward))
    steps = micro_batches + devices - 1
    assert makespan_s(timeline) == pytest.approx(steps * 3 * forward / 1e9)
    assert bubble_overhead(timeline) == pytest.approx((devices - 1) / micro_batches)
    assert bubble_fraction(timeline) == pytest.approx((devices - 1) / steps)
    assert busy_fraction(timeline) == pytest.approx([micro_batches / steps] * devices)


@settings(max_examples=15)
@given(st.integers(2, 3), st.integers(1, 3), st.integers(0, 2))
def test_bubble_of_a_loop(devices: int, loops: int, more: int) -> None:
    """Overhead (P - 1) / (M v) for M >= P."""
    micro_batches = devices + more
    program = training_program("breadth-first", devices, devices * loops, (micro_batches,))
    timeline = timeline_of(program, unit_durations(program))
    assert bubble_overhead(timeline) == pytest.approx((devices - 1) / (micro_batches * loops))


def test_breakdown_adds_up_all_ranks() -> None:
    program = training_program("gpipe", 2, 2, (3,))
    by_kind = busy_by_kind(timeline_of(program, unit_durations(program)))
    assert by_kind["forward"] == pytest.approx(6e-9)
    assert by_kind["backward"] == pytest.approx(12e-9)
    assert by_kind["send_activation"] == 0.0
    assert "reduce" not in by_kind


def test_an_empty_time_has_no_bubble() -> None:
    program = training_program("gpipe", 1, 1, (1,))
    timeline = timeline_of(program, lambda row, step: 0)
    assert bubble_fraction(timeline) == 1.0


@pytest.mark.parametrize(
    ("name", "stages", "expected"),
    [("gpipe", 3, [5, 5, 5]), ("1f1b", 3, [3, 2, 1]), ("breadth-first", 7, [15, 10, 10])],
)
def test_peak_in_flight(name: str, stages: int, expected: list[int]) -> None:
    assert peak_in_flight(training_program(name, 3, stages, (5,))) == expected


def test_a_forward_only_program_counts_every_forward() -> None:
    assert peak_in_flight(build_evaluation_program(ring_layout(2, 4, (3,)))) == [6, 6]
