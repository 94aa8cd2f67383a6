"""Traces of jobs for tests: steps that the simulator makes, as tables, JSON and folders of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.doors.trace.job.operations import OPERATIONS, TYPES, Operations, operations_of
from weft.doors.trace.job.program import implied_program
from weft.doors.trace.job.replay import Replay
from weft.program.kinds import BACKWARD
from weft.program.program import NONE
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline

Columns = Mapping[str, Sequence[Any]]


def skeleton(
    stages: int, replicas: int, micro_batches: int, steps: int, *, schedule: str = "1f1b", chunks: int = 1
) -> dict[str, list[Any]]:
    """The operations of alike steps in the order of a schedule, one second apart, without length."""
    pipeline, order = Pipeline(stages, stages * chunks, micro_batches), get_schedule(schedule)
    rows = []
    for step in range(steps):
        for stage in range(stages):
            for replica in range(replicas):
                rows += _rank(pipeline, order, step, stage, replica)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _rank(pipeline: Pipeline, order: Any, step: int, stage: int, replica: int) -> list[dict[str, Any]]:
    stages, last = pipeline.devices, pipeline.stages - 1
    made: list[tuple[str, int, int]] = [("params-all-gather", chunk, -1) for chunk in range(pipeline.loops)]
    for kind, of, micro_batch in zip(*order.order(pipeline, stage, {}), strict=True):
        way, ends = ("backward", (last, 0)) if kind == BACKWARD else ("forward", (0, last))
        made += [(f"{way}-recv", -1, -1)] if of != ends[0] else []
        made += [(f"{way}-compute", int(of) // stages, int(micro_batch))]
        made += [(f"{way}-send", -1, -1)] if of != ends[1] else []
    made += [("layernorm-grads-all-reduce", -1, -1)]
    made += [("embedding-grads-all-reduce", -1, -1)] if stage in (0, stages - 1) else []
    made += [("grads-reduce-scatter", chunk, -1) for chunk in range(pipeline.loops)]
    made += [("optimizer-clip-main-grad", -1, -1), ("optimizer", -1, -1)]
    counts: dict[str, int] = {}
    rows = []
    for place, (name, chunk, micro_batch) in enumerate(made):
        counts[name] = counts.get(name, -1) + 1
        rows.append(
            {
                "dp_rank": replica,
                "stage": stage,
                "rank": stage * 100 + replica,
                "step": 10 + step,
                "optype": name,
                "start_ts": float(place),
                "duration": 0.0,
                "seq_id": counts[name],
                "mc": chunk,
                "mb_id": micro_batch,
            }
        )
    return rows


def played(columns: Columns, seconds_of: Any) -> dict[str, list[Any]]:
    """The same operations in simulated steps; `seconds_of` gives times by step and instruction."""
    operations = operations_of(columns, "played")
    implied = implied_program(operations)
    replay, rows = Replay(implied), implied.rows
    found: dict[str, list[Any]] = {name: [] for name in (*columns,)}
    first = operations.take(implied.operation)
    sender = {int(receive): send for send, receive in enumerate(implied.receive_of) if receive != NONE}
    for step, seconds in enumerate(seconds_of(implied)):
        timeline = replay.timeline(seconds)
        for row in range(len(implied.program)):
            # A receive is recorded from the moment at which it is posted, at the latest that of its send.
            start = timeline.start_ns[sender.get(row, row)] / 1e9
            found["start_ts"].append(float(start))
            found["duration"].append(float(timeline.end_ns[row] / 1e9 - start))
            found["optype"].append(OPERATIONS[first.type[row]].name)
            found["step"].append(operations.steps[step])
            for name, column in (
                ("dp_rank", first.replica),
                ("stage", first.stage),
                ("rank", first.rank),
                ("seq_id", first.sequence),
                ("mc", first.chunk),
                ("mb_id", first.micro_batch),
            ):
                found[name].append(int(column[row]))
    assert rows.shape == (len(operations.steps), len(implied.program))
    return found


def even(stages: int = 4, replicas: int = 2, micro_batches: int = 6, steps: int = 3, **more: Any) -> Columns:
    """A trace whose operations of a type are alike: forwards of 10 ms, backwards of 20 ms, others of 1 ms."""

    def seconds(implied: Any) -> Any:
        usual = np.full(len(OPERATIONS), 1e-3)
        usual[TYPES["forward-compute"]], usual[TYPES["backward-compute"]] = 10e-3, 20e-3
        one = np.where(np.isin(np.arange(len(implied.types)), implied.receive_of), 0.0, usual[implied.types])
        return [one] * steps

    return played(skeleton(stages, replicas, micro_batches, steps, **more), seconds)


def slowed(columns: Columns, factor: float, **where: int) -> dict[str, list[Any]]:
    """The trace played again with the passes at a place, such as `stage=1`, longer by a factor."""

    def seconds(implied: Any) -> Any:
        replay = Replay(implied)
        first = implied.operations.take(implied.operation)
        mine = np.isin(first.type, (TYPES["forward-compute"], TYPES["backward-compute"]))
        for name, value in where.items():
            mine &= getattr(first, name) == value
        return [np.where(mine, factor * own, own) for own in replay.own_s]

    return played(columns, seconds)


def chrome(columns: Columns) -> dict[str, Any]:
    """The trace in Chrome's format: the columns are arguments of events."""
    events = []
    for row in range(len(columns["step"])):
        arguments = {
            name: columns[name][row] for name in columns if name not in ("optype", "start_ts", "duration")
        }
        events.append(
            {
                "ph": "X",
                "cat": "operation",
                "name": columns["optype"][row].replace("-", "_"),
                "pid": columns["rank"][row],
                "tid": 0,
                # Steps of one trace follow each other.
                "ts": 1e6 * (columns["start_ts"][row] + 100.0 * columns["step"][row]),
                "dur": 1e6 * columns["duration"][row],
                "args": arguments,
            }
        )
    return {"traceEvents": events}


def kineto_folder(columns: Columns, folder: Path) -> Path:
    """A file of each rank, with annotations in `ProfilerStep#` marks, by host and device."""
    folder.mkdir()
    ranks = sorted(
        set(zip(columns["stage"], columns["dp_rank"], columns["rank"], strict=True)), key=lambda one: one[:2]
    )
    world = [{"stage": stage, "dp_rank": replica} for stage, replica, _ in ranks]
    for number, (stage, replica, rank) in enumerate(ranks):
        mine = [row for row in range(len(columns["step"])) if columns["rank"][row] == rank]
        events: list[dict[str, Any]] = []
        for step in sorted({columns["step"][row] for row in mine}):
            place = {"ph": "X", "ts": 1e8 * step - 10.0, "dur": 9e7, "pid": 9, "tid": 9}
            events.append({"name": f"ProfilerStep#{step}", "cat": "user_annotation", **place})
        for row in mine:
            start = 1e6 * (columns["start_ts"][row] + 100.0 * columns["step"][row])
            for category, late, length in (
                ("user_annotation", -5.0, 1.0),
                ("gpu_user_annotation", 0.0, None),
            ):
                events.append(
                    {
                        "ph": "X",
                        "cat": category,
                        "name": columns["optype"][row],
                        "pid": 0,
                        "tid": 7,
                        "ts": start + late,
                        "dur": 1e6 * columns["duration"][row] if length is None else length,
                        "args": {"mc": columns["mc"][row], "mb_id": columns["mb_id"][row]},
                    }
                )
        groups = [
            {
                "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP",
                "ranks": [i for i, one in enumerate(world) if one["dp_rank"] == replica],
            },
            {
                "pg_desc": "mesh_dp",
                "ranks": [i for i, one in enumerate(world) if one["stage"] == stage],
            },
        ]
        info = {"rank": number, "world_size": len(world), "pg_config": groups}
        text = json.dumps({"traceEvents": events, "distributedInfo": info})
        (folder / f"rank{number}.json").write_text(text)
    return folder


def times(operations: Operations) -> list[tuple[float, ...]]:
    """Everything that a reader must keep, rounded to microseconds."""
    columns = (
        operations.type,
        operations.step,
        operations.rank,
        operations.replica,
        operations.stage,
        operations.sequence,
        np.round(operations.start_s * 1e6),
        np.round(operations.end_s * 1e6),
    )
    return [tuple(row) for row in np.stack(columns, axis=1).tolist()]
