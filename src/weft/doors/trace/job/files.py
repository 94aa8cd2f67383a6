"""Files with a trace of a job: Parquet, Chrome's JSON and Kineto's, or a folder with one of these per rank.

In JSON an operation is an event whose name is that of a type. Its arguments hold the columns of a Parquet
trace. Kineto's files of ranks have annotations instead. Then the rank, its replica and its stage come
from `distributedInfo`, and the step from `ProfilerStep#`. Annotations of devices count before those of hosts.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from weft.doors.trace.events import is_trace, read_bytes, spans_of
from weft.doors.trace.job.operations import INTEGERS, NEEDED, TYPES, Operations, operations_of
from weft.errors import InputError, Violation

_PARQUET = b"PAR1"
_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_ON_DEVICE = frozenset({"gpu_user_annotation", "kernel"})
_OPTIONAL = ("rank", "seq_id", "mc", "mb_id")
_NAMES: Mapping[str, str] = {
    "pp_rank": "stage",
    "pp": "stage",
    "dp": "dp_rank",
    "chunk": "mc",
    "micro_batch": "mb_id",
    "microbatch": "mb_id",
    "global_rank": "rank",
}
# Words in the description of a process group that say its axis.
_AXES: Mapping[str, tuple[str, ...]] = {
    "stage": ("pp", "pipeline"),
    "dp_rank": ("dp", "data", "fsdp"),
}


def read_job(path: Path) -> Operations | None:
    """Return the operations of a trace of a job, or None for any other file.

    Raises:
        InputError: when the file cannot be read, or its operations make no job.
    """
    if path.is_dir():
        return _read_folder(path)
    data = read_bytes(path)
    if data.startswith(_PARQUET):
        return operations_of(_parquet(data, path), str(path))
    if not is_trace(data):
        return None
    rows = list(_operations(*_events(data, str(path))))
    return _from_rows(rows, str(path)) if rows else None


def _read_folder(path: Path) -> Operations:
    if (path / "plan.json").is_file():
        problem = f"a run directory; `weft compare {path}` explains its steps"
        raise InputError(Violation(str(path), problem))
    files = sorted(one for one in path.iterdir() if one.name.endswith((".json", ".json.gz")))
    rows: list[dict[str, Any]] = []
    for file in files:
        data = read_bytes(file)
        if is_trace(data):
            rows += _operations(*_events(data, str(file)))
    if not rows:
        problem = "a folder without traces of a job's ranks"
        raise InputError(Violation(str(path), problem, f"files with events such as {next(iter(TYPES))}"))
    return _from_rows(rows, str(path))


def _parquet(data: bytes, path: Path) -> Mapping[str, Sequence[Any]]:
    try:
        with pq.ParquetFile(io.BytesIO(data)) as file:
            wanted = [name for name in file.schema_arrow.names if name in (*NEEDED, *_OPTIONAL)]
            table = file.read(columns=wanted)
            return {name: table.column(name).to_pylist() for name in wanted}
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(Violation(str(path), f"not a Parquet file: {reason}")) from None


def _events(data: bytes, name: str) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """Return the events with a duration, and the facts about the job."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(name, f"not a JSON file: {error}")) from None
    events = record.get("traceEvents") if isinstance(record, Mapping) else record
    info = record.get("distributedInfo") if isinstance(record, Mapping) else None
    spans = spans_of(events if isinstance(events, list) else (), name)
    return spans, info if isinstance(info, Mapping) else {}


def _operations(spans: list[dict[str, Any]], info: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row of each operation among the events of a file."""
    named = [(_type_of(event["name"]), event) for event in spans]
    devices = {(name, _rank_of(event, info)) for name, event in named if event.get("cat") in _ON_DEVICE}
    steps = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(match[1]))
        for event in spans
        if event.get("cat") not in _ON_DEVICE and (match := _STEP.match(event["name"]))
    )
    placed = _placed(info)
    for name, event in named:
        if name is None:
            continue
        rank = _rank_of(event, info)
        if (name, rank) in devices and event.get("cat") not in _ON_DEVICE:
            continue
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, Mapping) else {}
        given = {_NAMES.get(key.replace("-", "_"), key): value for key, value in arguments.items()}
        yield {
            **({} if rank is None else {"rank": rank}),
            **placed,
            "step": _step_at(steps, float(event["ts"])),
            **{key: value for key, value in given.items() if key in INTEGERS},
            "optype": name,
            "start_ts": event["ts"] / 1e6,
            "duration": event["dur"] / 1e6,
        }


def _type_of(name: str) -> str | None:
    """Return the type that a name spells, with any of the usual signs between its words."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).replace("receive", "recv")
    return plain if plain in TYPES else None


def _rank_of(event: Mapping[str, Any], info: Mapping[str, Any]) -> int | None:
    arguments = event.get("args")
    given = arguments.get("rank", arguments.get("global_rank")) if isinstance(arguments, Mapping) else None
    found = given if given is not None else info.get("rank")
    return found if isinstance(found, int) else None


def _placed(info: Mapping[str, Any]) -> dict[str, int]:
    """Return the stage and the replica of a file's rank: its places in the process groups of these axes."""
    found: dict[str, int] = {}
    rank, groups = info.get("rank"), info.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("ranks"), list):
            continue
        words = set(re.split(r"[^a-z]+", str(group.get("pg_desc", "")).lower()))
        for axis, names in _AXES.items():
            if words.intersection(names) and rank in group["ranks"]:
                found.setdefault(axis, group["ranks"].index(rank))
    return {"stage": 0, "dp_rank": 0, **found} if isinstance(rank, int) else found


def _step_at(steps: Sequence[tuple[float, float, int]], time: float) -> int:
    """Return the last step that began by then; without marks all operations are of one step."""
    begun = [number for start, _, number in steps if start <= time]
    return begun[-1] if begun else (steps[0][2] if steps else 0)


def _from_rows(rows: list[dict[str, Any]], name: str) -> Operations:
    present = [one for one in (*NEEDED, *_OPTIONAL) if all(one in row for row in rows)]
    return operations_of({one: [row[one] for row in rows] for one in present}, name)
