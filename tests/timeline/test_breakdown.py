"""Every moment of a step has one cause."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import training_program
from timeline.timelines import timeline_of, unit_durations

from weft.program.kinds import KINDS, is_compute
from weft.program.program import NONE
from weft.timeline.figures import (
    COLLECTIVES,
    MESSAGES,
    WAITING,
    bubble_fraction,
    busy_by_kind,
    makespan_s,
    step_breakdown,
)
from weft.timeline.timeline import Timeline


def lengthened(timeline: Timeline, peer: np.ndarray, longer_ns: int) -> Timeline:
    """Messages and collectives last so much longer, whatever they meet."""
    rows = ~is_compute(timeline.kind)
    return replace(timeline, end_ns=timeline.end_ns + np.where(rows, longer_ns, 0))


@settings(max_examples=30)
@given(
    st.sampled_from(["gpipe", "1f1b", "breadth-first"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 20),
)
def test_causes_add_up_to_the_step(
    name: str, devices: int, micro_batches: int, longer_ns: int, more_ns: int
) -> None:
    program = training_program(name, devices, devices, (micro_batches,) * 2)
    peer = program.columns.peer
    timeline = lengthened(timeline_of(program, unit_durations(program)), peer, longer_ns)
    step_s = makespan_s(timeline) + more_ns * 1e-9
    causes = step_breakdown(timeline, peer, step_s)
    assert sum(causes.values()) == pytest.approx(step_s)
    assert all(seconds >= 0.0 for seconds in causes.values())
    busy = busy_by_kind(timeline)
    ranks = len(np.unique(timeline.rank))
    for kind in KINDS:
        if kind.name in causes:
            assert causes[kind.name] == pytest.approx(busy[kind.name] / ranks)


def test_without_communication_what_is_left_is_the_bubble() -> None:
    program = training_program("1f1b", 4, 4, (6,))
    timeline = timeline_of(program, unit_durations(program))
    step_s = makespan_s(timeline)
    causes = step_breakdown(timeline, program.columns.peer, step_s)
    assert causes[WAITING] / step_s == pytest.approx(bubble_fraction(timeline))
    assert causes[COLLECTIVES] == causes[MESSAGES] == 0.0


def rows(kinds: list[str], ranks: list[int], spans: list[tuple[int, int]]) -> Timeline:
    """A timeline by hand; row r is instruction r."""
    count = len(kinds)
    codes = {kind.name: code for code, kind in enumerate(KINDS)}
    nothing = np.zeros(count, dtype=np.int64)
    start, end = np.array(spans, dtype=np.int64).T
    return Timeline(
        run="",
        plan_id="",
        clock="predicted",
        step=nothing,
        id=np.arange(count),
        position=np.arange(count),
        kind=np.array([codes[name] for name in kinds]),
        stage=nothing,
        micro_batch=nothing,
        rank=np.array(ranks),
        stream=nothing,
        group=nothing,
        bytes=nothing,
        posted_ns=start,
        start_ns=start,
        end_ns=end,
    )


def test_each_cause_by_hand() -> None:
    """Rank 0: forward 0-10, its message 5-14, a collective 12-20, waits to 30. Rank 1: the message of rank 0
    reaches it until 14, then it computes to 30."""
    timeline = rows(
        ["forward", "send_activation", "reduce", "backward"],
        [0, 0, 0, 1],
        [(0, 10), (5, 14), (12, 20), (14, 30)],
    )
    peer = np.array([NONE, 1, NONE, NONE])
    causes = step_breakdown(timeline, peer, 30e-9)
    halves = {
        "forward": 10,
        "backward": 16,
        COLLECTIVES: 8,  # 12-20 on rank 0
        MESSAGES: 2 + 9,  # 10-12 on rank 0, 5-14 on rank 1
        WAITING: 10 + 5,  # 20-30 on rank 0, 0-5 on rank 1
    }
    assert causes == pytest.approx({name: ns * 1e-9 / 2 for name, ns in halves.items()})


def test_what_reaches_into_the_next_step_covers_its_beginning() -> None:
    timeline = rows(["forward", "reduce"], [0, 0], [(4, 10), (8, 14)])
    causes = step_breakdown(timeline, np.array([NONE, NONE]), 10e-9)
    assert causes == pytest.approx({"forward": 6e-9, COLLECTIVES: 4e-9, MESSAGES: 0.0, WAITING: 0.0})


def test_nothing_has_no_causes() -> None:
    empty = rows(["forward"], [0], [(0, 1)]).take(np.array([False]))
    assert step_breakdown(empty, np.array([NONE]), 1.0) == {}
