"""Events of a trace: those with a duration, as columns, and the trace's facts about its job."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.describe.units import shown
from weft.doors.trace.classes import OTHER, class_of
from weft.errors import InputError, Violation
from weft.program.arrays import Floats, Ints

_GZIP = b"\x1f\x8b"
# Events of a device; everything else that Kineto records is the host's.
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel"})
_HOST = frozenset(
    {"cpu_op", "cuda_runtime", "cuda_driver", "python_function", "user_annotation", "privateuse1_op"}
)
_NEVER = frozenset({"gpu_user_annotation", "overhead", "Trace", "ac2g", "fwdbwd", "cpu_instant_event"})
_PREDICTED = re.compile(r"rank \d+ predicted")
_STEP = re.compile(r"ProfilerStep#(\d+)")
# Three thousand years.
_MOST_US = 1e17


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGroup:
    """A process group of the trace: its number of ranks, its purpose, and its collectives."""

    name: str
    purpose: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Columns of the events with a duration, sorted by start; seconds from the first event's start.

    Attributes:
        start_s, end_s, stream, kind: of the events on streams of devices, or on threads where a trace has no
            device; `kind` counts in `CLASSES`, `stream` in `streams`. `name` counts in `names`.
        count: 1, and 0 for a further piece of an event.
        streams: a name for each stream.
        host_start_s, host_end_s, host_name: the host's calls at the same time, the outermost ones.
        steps: (number, start_s, end_s) of every ProfilerStep#.
        on_device: True if events are those of devices.
        rank, world_size, backend, groups: of distributedInfo; None and empty where there is none.
    """

    start_s: Floats
    end_s: Floats
    stream: Ints
    kind: Ints
    count: Ints
    name: Ints
    names: tuple[str, ...]
    streams: tuple[str, ...]
    host_start_s: Floats
    host_end_s: Floats
    host_name: tuple[str, ...]
    steps: tuple[tuple[int, float, float], ...]
    on_device: bool
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    groups: tuple[TraceGroup, ...] = ()
    device: str = ""


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if it is gzip.

    Raises:
        InputError: when it cannot be read or unpacked.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP) else data
    except FileNotFoundError:
        raise InputError(Violation(str(path), "no such file")) from None
    except IsADirectoryError:
        raise InputError(Violation(str(path), "a folder, not a file")) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(Violation(str(path), f"not a whole gzip file: {error}")) from None
    except OSError as error:
        raise InputError(Violation(str(path), f"cannot be read: {error.strerror or error}")) from None


def is_trace(data: bytes) -> bool:
    """Return True for JSON with Chrome's trace events."""
    head = data[:200].lstrip()
    return (head.startswith(b"{") and b'"traceEvents"' in data) or (head.startswith(b"[") and b'"ph"' in data)


def read_trace(data: bytes, name: str) -> Trace:
    """Return the events of a trace.

    Raises:
        InputError: when it is no JSON, or has no event with a duration.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(name, f"not a JSON file: {error}")) from None
    events = record.get("traceEvents") if isinstance(record, Mapping) else record
    record = record if isinstance(record, Mapping) else {}
    if not isinstance(events, list):
        raise InputError(Violation(name, "traceEvents: a list of events is needed"))
    spans = _measured(spans_of(events, name), events)
    steps = tuple(sorted(_steps(spans)))
    worked = [event for event in spans if event.get("cat") in _DEVICE]
    on_device = bool(worked)
    host = [event for event in spans if event.get("cat") in _HOST and not _STEP.match(str(event["name"]))]
    if not worked:
        ignored = _NEVER | {"user_annotation", "python_function", "profiler_step"}
        worked = _flattened([event for event in spans if event.get("cat") not in ignored])
    if not worked:
        raise InputError(Violation(name, "no event of the trace took any time", "a trace with ph X events"))
    return _columns(worked, host if on_device else [], steps, on_device, record, events)


def _measured(spans: list[dict[str, Any]], events: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the spans without weft's predictions, which a run's trace has beside the measurement."""
    predicted = {
        process
        for (process, thread), label in _labels(events).items()
        if not thread and _PREDICTED.fullmatch(label)
    }
    return [event for event in spans if str(event.get("pid")) not in predicted] or spans


def spans_of(events: Iterable[object], name: str) -> list[dict[str, Any]]:
    """Return the events with a duration.

    Raises:
        InputError: for a time that no clock tells, such as infinity.
    """
    spans = [event for event in events if isinstance(event, dict) and _took_time(event)]
    for event in spans:
        # A negative duration is a clock that was set back.
        if not (abs(event["ts"]) < _MOST_US and abs(event["dur"]) < _MOST_US):
            kind, start, length = (shown(event[key]) for key in ("name", "ts", "dur"))
            problem = f"event {kind} at {start} us lasts {length} us"
            raise InputError(Violation(name, problem))
    return spans


def _took_time(event: Mapping[str, Any]) -> bool:
    if event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    numbers = (event.get("ts"), event.get("dur"))
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)


def _steps(spans: Iterable[Mapping[str, Any]]) -> set[tuple[int, float, float]]:
    """Return the host's marks; a device's have the same names and start later."""
    found: dict[int, tuple[float, float]] = {}
    for event in spans:
        match = _STEP.match(event["name"])
        if match and len(match[1]) < 10 and event.get("cat") != "gpu_user_annotation":
            found.setdefault(int(match[1]), (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return {(number, *times) for number, times in found.items()}


def _flattened(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return nested events of threads as a sequence. Each time belongs to the outermost event of a
    known class, such as a product with the calls inside it. Without one it belongs to the innermost event."""
    threads: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in spans:
        if not _STEP.match(event["name"]):
            threads.setdefault(_place(event), []).append(event)
    return [piece for events in threads.values() for piece in _pieces(events)]


def _pieces(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of one thread; all but an event's first one count 0."""
    stack: list[dict[str, Any]] = []
    counted: set[int] = set()
    now = 0.0

    def until(time: float) -> Iterator[dict[str, Any]]:
        owner = next((event for event in stack if class_of(event) != OTHER), stack[-1])
        if time > now:
            yield owner | {"ts": now, "dur": time - now, "count": int(id(owner) not in counted)}
            counted.add(id(owner))

    for event in [*sorted(events, key=lambda event: (event["ts"], -event["dur"])), None]:
        begin = np.inf if event is None else event["ts"]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= begin:
            end = stack[-1]["ts"] + stack[-1]["dur"]
            yield from until(end)
            now = max(now, end)
            stack.pop()
        if event is not None:
            if stack:
                yield from until(begin)
            now = max(now, begin)
            stack.append(event)


def _place(event: Mapping[str, Any]) -> tuple[str, str]:
    return (str(event.get("pid")), str(event.get("tid")))


def _columns(
    worked: list[dict[str, Any]],
    host: list[dict[str, Any]],
    steps: tuple[tuple[int, float, float], ...],
    on_device: bool,
    record: Mapping[str, Any],
    events: Sequence[Any],
) -> Trace:
    worked.sort(key=lambda event: event["ts"])
    outermost = _outermost(host)
    origin = min(worked[0]["ts"] / 1e6, *(start for _, start, _ in steps), worked[0]["ts"] / 1e6)
    names = {name: index for index, name in enumerate(dict.fromkeys(event["name"] for event in worked))}
    labels = _labels(events)
    streams: dict[str, int] = {}
    stream = [streams.setdefault(_stream(event, labels, on_device), len(streams)) for event in worked]
    start = np.array([event["ts"] for event in worked], dtype=np.float64) / 1e6 - origin
    length = np.array([max(0.0, event["dur"]) for event in worked], dtype=np.float64) / 1e6
    info = record.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    properties = record.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else {}
    return Trace(
        start_s=start,
        end_s=start + length,
        stream=np.array(stream, dtype=np.int64),
        kind=np.array([class_of(event) for event in worked], dtype=np.int64),
        count=np.array([event.get("count", 1) for event in worked], dtype=np.int64),
        name=np.array([names[event["name"]] for event in worked], dtype=np.int64),
        names=tuple(names),
        streams=tuple(streams),
        host_start_s=np.array([event["ts"] for event in outermost], dtype=np.float64) / 1e6 - origin,
        host_end_s=np.array([event["ts"] + event["dur"] for event in outermost], dtype=np.float64) / 1e6
        - origin,
        host_name=tuple(event["name"] for event in outermost),
        steps=tuple((number, begin - origin, end - origin) for number, begin, end in steps),
        on_device=on_device,
        rank=_count(info.get("rank")),
        world_size=_count(info.get("world_size")),
        backend=str(info["backend"]) if "backend" in info else None,
        groups=tuple(_groups(info)),
        device=str(first.get("name", "")) if isinstance(first, Mapping) else "",
    )


def _outermost(host: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls outside all other calls of their thread, by start."""
    found: list[dict[str, Any]] = []
    ends: dict[tuple[str, str], float] = {}
    for event in sorted(host, key=lambda event: (event["ts"], -event["dur"])):
        place = _place(event)
        if event["ts"] >= ends.get(place, -np.inf):
            ends[place] = event["ts"] + event["dur"]
            found.append(event)
    return found


def _labels(events: Sequence[Any]) -> dict[tuple[str, str], str]:
    """Return the trace's names of threads, and of processes under an empty thread."""
    found = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M":
            arguments = event.get("args")
            if not isinstance(arguments, Mapping) or "name" not in arguments:
                continue
            if event.get("name") == "thread_name":
                found[_place(event)] = str(arguments["name"]).strip()
            elif event.get("name") == "process_name":
                found[str(event.get("pid")), ""] = str(arguments["name"]).strip()
    return found


def _stream(event: Mapping[str, Any], labels: Mapping[tuple[str, str], str], on_device: bool) -> str:
    """Return the common name of a device's stream, or of a thread."""
    arguments = event.get("args")
    if on_device and isinstance(arguments, Mapping) and "stream" in arguments:
        return f"device {arguments.get('device', event.get('pid'))} stream {arguments['stream']}"
    process, thread = _place(event)
    of_process = labels.get((process, ""), f"{'device' if on_device else 'process'} {process}")
    return f"{of_process} {labels.get((process, thread), f'thread {thread}')}"


def _groups(info: Mapping[str, Any]) -> Iterator[TraceGroup]:
    configured = info.get("pg_config")
    if not isinstance(configured, list):
        return
    for one in configured:
        size = _count(one.get("pg_size")) if isinstance(one, Mapping) else None
        if size is not None:
            purpose = str(one.get("pg_desc", ""))
            yield TraceGroup(name=str(one.get("pg_name", "")), purpose=purpose, size=size)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
