"""Chrome trace JSON: tracks, times and arrows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program.layouts import training_program
from timeline.timelines import timeline_of, unit_durations

from weft.program.kinds import FORWARD, RECEIVE_ACTIVATION, RECEIVE_GRADIENT
from weft.program.program import Program
from weft.timeline.perfetto import perfetto_trace, write_perfetto
from weft.timeline.timeline import Timeline

Event = dict[str, Any]


@pytest.fixture
def program() -> Program:
    return training_program("breadth-first", 2, 4, (2,))


@pytest.fixture
def timelines(program: Program) -> list[Timeline]:
    predicted = timeline_of(program, lambda row, step: 1500)
    measured = timeline_of(program, lambda row, step: 2000 + row, steps=2, clock="monotonic")
    return [predicted, measured]


def events(trace: dict[str, Any], phase: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_each_rank_of_each_timeline_is_a_process(timelines: list[Timeline]) -> None:
    named = {
        event["pid"]: event["args"]["name"]
        for event in events(perfetto_trace(timelines), "M")
        if event["name"] == "process_name"
    }
    assert named == {
        0: "rank 0 predicted",
        1: "rank 0 monotonic",
        2: "rank 1 predicted",
        3: "rank 1 monotonic",
    }


def test_each_stream_is_a_thread_and_slices_do_not_overlap(timelines: list[Timeline]) -> None:
    trace = perfetto_trace(timelines)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(trace, "M")
        if event["name"] == "thread_name"
    }
    assert threads[0, 0] == "compute"
    assert threads[2, 19] == "steps"
    slices = events(trace, "X")
    assert {(event["pid"], event["tid"]) for event in slices} == set(threads)
    assert sum(event["cat"] != "profiler_step" for event in slices) == sum(
        len(timeline) for timeline in timelines
    )
    for place in threads:
        mine = sorted(
            (event["ts"], event["dur"]) for event in slices if (event["pid"], event["tid"]) == place
        )
        for (start, length), (following, _) in pairwise(mine):
            assert start + length <= following + 1e-9


def test_times_are_microseconds_and_ids_join(program: Program, timelines: list[Timeline]) -> None:
    first = next(event for event in events(perfetto_trace(timelines), "X") if event["name"] == "F0.0")
    assert first["dur"] == 1.5
    columns = program.columns
    row = np.flatnonzero((columns.kind == FORWARD) & (columns.stage == 0) & (columns.micro_batch == 0))[0]
    assert int(first["args"]["id"], 16) == int(program.ids[row])


def test_steps_are_marked_for_trace_analysis(timelines: list[Timeline]) -> None:
    marks = [
        event["name"]
        for event in events(perfetto_trace(timelines[1:]), "X")
        if event["cat"] == "profiler_step"
    ]
    assert sorted(marks) == ["ProfilerStep#0"] * 2 + ["ProfilerStep#1"] * 2
    info = perfetto_trace(timelines)["distributedInfo"]
    assert (info["rank"], info["world_size"]) == (0, 2)


def test_an_arrow_joins_every_send_to_its_receive(program: Program, timelines: list[Timeline]) -> None:
    trace = perfetto_trace(timelines, program)
    starts = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    receives = np.isin(program.columns.kind, (RECEIVE_ACTIVATION, RECEIVE_GRADIENT)).sum()
    assert len(starts) == len(events(trace, "s")) == 3 * receives
    assert starts.keys() == ends.keys()
    inside = {(event["pid"], event["tid"], event["ts"]): event["dur"] for event in events(trace, "X")}
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        assert start["pid"] // 2 != ends[number]["pid"] // 2
        assert start["pid"] % 2 == ends[number]["pid"] % 2
        assert (start["pid"], start["tid"], start["ts"]) in inside
    assert not events(perfetto_trace(timelines), "s")


def test_an_arrow_that_clocks_would_turn_round_is_left_out(program: Program) -> None:
    timeline = timeline_of(program, unit_durations(program))
    receives = np.isin(timeline.kind, (RECEIVE_ACTIVATION, RECEIVE_GRADIENT))
    early = np.where(receives, -10, timeline.start_ns)
    trace = perfetto_trace(
        [replace(timeline, start_ns=early, end_ns=np.where(receives, -5, timeline.end_ns))], program
    )
    assert events(trace, "s") == []


def test_the_file_is_the_trace(tmp_path: Path, program: Program, timelines: list[Timeline]) -> None:
    write_perfetto(tmp_path / "trace.json", timelines, program)
    assert json.loads((tmp_path / "trace.json").read_text()) == perfetto_trace(timelines, program)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
