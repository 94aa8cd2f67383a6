"""Timelines as Chrome trace JSON, for Perfetto, chrome://tracing and trace analysis tools.

Each rank of each timeline is a process, so predicted and measured ranks lie above each other. Each stream is
a thread. A flow arrow joins a send to its receive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.files import replacing
from weft.program.arrays import Ints
from weft.program.kinds import KINDS, is_send, message_kinds
from weft.program.program import Program
from weft.timeline.timeline import Timeline, label, stream_names

Event = dict[str, Any]

# Thread ids are rank * 10 + lane; the last lane marks the optimizer steps.
_LANES = 10
_STEP_LANE = 9


def perfetto_trace(timelines: Sequence[Timeline], program: Program | None = None) -> dict[str, Any]:
    """Return the trace as plain data. The timelines' shared `program` adds arrows from sends to receives.

    Times are microseconds. `distributedInfo` describes the merged trace: all ranks in one file.
    """
    events: list[Event] = []
    for track, timeline in enumerate(timelines):
        tracks = _Tracks(timeline, track, len(timelines))
        events += tracks.names()
        events += tracks.slices()
        events += tracks.steps()
        if program is not None:
            events += tracks.arrows(program)
    ranks = {int(rank) for timeline in timelines for rank in np.unique(timeline.rank)}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": 0, "world_size": max(ranks, default=-1) + 1, "backend": "gloo"},
    }


def write_perfetto(path: Path, timelines: Sequence[Timeline], program: Program | None = None) -> None:
    """Write the trace whole or not at all."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        json.dump(perfetto_trace(timelines, program), file, separators=(",", ":"))


class _Tracks:
    """The events of one timeline; `track` is its index among all."""

    def __init__(self, timeline: Timeline, track: int, tracks: int) -> None:
        self._timeline = timeline
        self._track = track
        self._tracks = tracks

    def _process(self, rank: int) -> int:
        return rank * self._tracks + self._track

    def names(self) -> Iterator[Event]:
        timeline = self._timeline
        streams = stream_names()
        for rank in np.unique(timeline.rank).tolist():
            process = self._process(rank)
            yield _meta("process_name", process, 0, {"name": f"rank {rank} {timeline.clock}"})
            yield _meta("process_sort_index", process, 0, {"sort_index": process})
            used = np.unique(timeline.stream[timeline.rank == rank]).tolist()
            for lane, name in [(lane, streams[lane]) for lane in used] + [(_STEP_LANE, "steps")]:
                thread = rank * _LANES + lane
                yield _meta("thread_name", process, thread, {"name": name})
                # The steps lie above the streams.
                yield _meta("thread_sort_index", process, thread, {"sort_index": (lane + 1) % _LANES})

    def slices(self) -> Iterator[Event]:
        timeline = self._timeline
        for row in range(len(timeline)):
            rank, kind = int(timeline.rank[row]), int(timeline.kind[row])
            yield {
                "ph": "X",
                "name": label(kind, int(timeline.stage[row]), int(timeline.micro_batch[row])),
                "cat": KINDS[kind].name,
                "pid": self._process(rank),
                "tid": rank * _LANES + int(timeline.stream[row]),
                "ts": _microseconds(timeline.start_ns[row]),
                "dur": _microseconds(timeline.end_ns[row] - timeline.start_ns[row]),
                "args": {
                    "id": f"{int(timeline.id[row]):016x}",
                    "step": int(timeline.step[row]),
                    "bytes": int(timeline.bytes[row]),
                    "posted_us": _microseconds(timeline.posted_ns[row]),
                },
            }

    def steps(self) -> Iterator[Event]:
        timeline = self._timeline
        pairs, pair = np.unique(np.stack([timeline.rank, timeline.step], axis=1), axis=0, return_inverse=True)
        start = np.full(len(pairs), np.iinfo(np.int64).max)
        end = np.full(len(pairs), np.iinfo(np.int64).min)
        np.minimum.at(start, pair.reshape(-1), timeline.start_ns)
        np.maximum.at(end, pair.reshape(-1), timeline.end_ns)
        for (rank, step), begin, finish in zip(pairs.tolist(), start, end, strict=True):
            yield {
                "ph": "X",
                "name": f"ProfilerStep#{step}",
                "cat": "profiler_step",
                "pid": self._process(rank),
                "tid": rank * _LANES + _STEP_LANE,
                "ts": _microseconds(begin),
                "dur": _microseconds(finish - begin),
            }

    def arrows(self, program: Program) -> Iterator[Event]:
        timeline = self._timeline
        for number, (send, receive) in enumerate(_messages(timeline, program).tolist()):
            begin = timeline.start_ns[send]
            # An arrow must not end before it starts, and must end inside its receive.
            end = max(begin, timeline.start_ns[receive])
            if end > timeline.end_ns[receive]:
                continue
            shared = {"name": "message", "cat": "message", "id": number * self._tracks + self._track}
            for phase, row, time in (("s", send, begin), ("f", receive, end)):
                rank = int(timeline.rank[row])
                thread = rank * _LANES + int(timeline.stream[row])
                place = {"pid": self._process(rank), "tid": thread, "ts": _microseconds(time)}
                yield {"ph": phase, "bp": "e", **shared, **place}


def _messages(timeline: Timeline, program: Program) -> Ints:
    """Return timeline rows of every send and its receive in the same step, shape (messages, 2)."""
    edges = program.edges
    kinds = program.columns.kind
    sends = is_send(kinds[edges.source])
    joined = sends & np.isin(kinds[edges.target], [receive for _, receive in message_kinds()])
    receive_of = dict(
        zip(
            program.ids[edges.source[joined]].tolist(),
            program.ids[edges.target[joined]].tolist(),
            strict=True,
        )
    )
    row_of = {
        key: row for row, key in enumerate(zip(timeline.step.tolist(), timeline.id.tolist(), strict=True))
    }
    pairs = [
        (row, row_of[step, receive_of[identity]])
        for (step, identity), row in row_of.items()
        if (step, receive_of.get(identity)) in row_of
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _meta(name: str, process: int, thread: int, arguments: Event) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _microseconds(nanoseconds: np.int64) -> float:
    return int(nanoseconds) / 1000
