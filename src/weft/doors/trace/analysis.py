"""The parts of a trace's time: busy and idle time, classes of kernels, exposed communication, gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.doors.trace.classes import CLASSES, COLLECTIVE, shown_name
from weft.doors.trace.events import Trace
from weft.program.arrays import Floats, Ints

LONGEST_GAPS = 5
LARGEST_NAMES = 8
# Times of traces are whole nanoseconds.
_ROUNDING_S = 0.5e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which no stream of any device is busy."""

    start_s: float
    length_s: float
    step: int | None
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Figures of a trace; all times in seconds.

    Attributes:
        span_s: from the first event that counts to the end of the last; whole steps where there are any.
        busy_s: time in which at least one stream is busy. `idle_s`: the rest.
        stream_busy_s: by stream. `class_s`: summed over streams, by class; they may overlap.
        exposed_s: time in which only collectives run. `collective_s`: time in which any run.
        largest: (name, class, count, seconds) of the kernels with the most time.
        gaps: the longest.
        step_s: of every step. `kernel_median_s`: of all kernels.
    """

    trace: Trace
    span_s: float
    busy_s: float
    stream_busy_s: Mapping[str, float]
    class_s: Mapping[str, float]
    exposed_s: float
    collective_s: float
    largest: tuple[tuple[str, str, int, float], ...]
    gaps: tuple[Gap, ...]
    step_s: Mapping[int, float]
    kernel_median_s: float

    @property
    def idle_s(self) -> float:
        return max(0.0, self.span_s - self.busy_s)

    def record(self) -> dict[str, Any]:
        """Return the JSON answer."""
        trace = self.trace
        return {
            "trace": "device" if trace.on_device else "host",
            "device": trace.device or None,
            "rank": trace.rank,
            "world_size": trace.world_size,
            "backend": trace.backend,
            "groups": [{"name": one.name, "purpose": one.purpose, "size": one.size} for one in trace.groups],
            "span_s": self.span_s,
            "busy_s": self.busy_s,
            "idle_share": self.idle_s / self.span_s if self.span_s else 0.0,
            "collective_s": self.collective_s,
            "exposed_s": self.exposed_s,
            "streams": dict(self.stream_busy_s),
            "classes": dict(self.class_s),
            "kernels": [
                {"name": name, "class": kind, "count": count, "total_s": total_s}
                for name, kind, count, total_s in self.largest
            ],
            "gaps": [
                {"start_s": gap.start_s, "length_s": gap.length_s, "step": gap.step, "host": gap.host}
                for gap in self.gaps
            ],
            "steps": {str(number): length for number, length in self.step_s.items()},
            "kernel_median_s": self.kernel_median_s,
            "says": says(self),
        }


def analyse(trace: Trace) -> Analysis:
    """Return the figures of a trace, over its whole steps if it marks any with events in them."""
    begin, end = _window(trace)
    inside = (trace.end_s > begin) & (trace.start_s < end)
    start, stop = np.clip(trace.start_s[inside], begin, end), np.clip(trace.end_s[inside], begin, end)
    kind, stream, name = trace.kind[inside], trace.stream[inside], trace.name[inside]
    length = stop - start
    busy = union(start, stop)
    talks = kind == COLLECTIVE
    computing = union(start[~talks], stop[~talks])
    busy_s = _covered(busy)
    return Analysis(
        trace=trace,
        span_s=end - begin,
        busy_s=busy_s,
        stream_busy_s={
            label: _covered(union(start[stream == index], stop[stream == index]))
            for index, label in enumerate(trace.streams)
        },
        class_s={label: float(length[kind == index].sum()) for index, label in enumerate(CLASSES)},
        exposed_s=max(0.0, busy_s - _covered(computing)),
        collective_s=_covered(union(start[talks], stop[talks])),
        largest=_largest(trace, name, kind, trace.count[inside], length),
        gaps=_gaps(trace, busy, begin, end),
        step_s={number: last - first for number, first, last in trace.steps},
        kernel_median_s=float(np.median(length)) if len(length) else 0.0,
    )


def _window(trace: Trace) -> tuple[float, float]:
    """Return the begin and end of the steps, with kernels that outlast them; else of all events."""
    last = float(trace.end_s.max())
    if not trace.steps:
        return float(trace.start_s.min()), last
    begin = min(start for _, start, _ in trace.steps)
    end = max(stop for _, _, stop in trace.steps)
    if not ((trace.end_s > begin) & (trace.start_s < end)).any():
        return float(trace.start_s.min()), last
    # A device finishes later than its host.
    return begin, max(end, last) if trace.on_device else end


def union(start: Floats, end: Floats) -> Floats:
    """Return disjoint intervals that cover the same time, rising, shape (intervals, 2)."""
    if len(start) == 0:
        return np.empty((0, 2))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([start[first], end[last]], axis=1)


def _covered(intervals: Floats) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _largest(
    trace: Trace, name: Ints, kind: Ints, counts: Ints, length: Floats
) -> tuple[tuple[str, str, int, float], ...]:
    """Return the largest kernels; those that differ only in their template's arguments count together."""
    totals: dict[tuple[str, str], list[float]] = {}
    seconds = np.bincount(name, weights=length, minlength=len(trace.names))
    count = np.bincount(name, weights=counts, minlength=len(trace.names))
    first = {int(one): int(what) for one, what in zip(name.tolist()[::-1], kind.tolist()[::-1], strict=True)}
    for index, what in sorted(first.items()):
        entry = totals.setdefault((shown_name(trace.names[index]), CLASSES[what]), [0, 0.0])
        entry[0] += int(count[index])
        entry[1] += float(seconds[index])
    ordered = sorted(totals.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple((label, what, int(entry[0]), entry[1]) for (label, what), entry in ordered[:LARGEST_NAMES])


def _gaps(trace: Trace, busy: Floats, begin: float, end: float) -> tuple[Gap, ...]:
    edges = np.concatenate([[begin], busy.ravel(), [end]]).reshape(-1, 2)
    length = edges[:, 1] - edges[:, 0]
    longest = np.argsort(-length, kind="stable")[:LONGEST_GAPS]
    return tuple(
        Gap(
            start_s=float(edges[index, 0]),
            length_s=float(length[index]),
            step=_step_at(trace, float(edges[index].mean())),
            host=_host_at(trace, float(edges[index, 0]), float(edges[index, 1])),
        )
        for index in longest.tolist()
        if length[index] > _ROUNDING_S
    )


def _step_at(trace: Trace, time_s: float) -> int | None:
    return next((number for number, start, end in trace.steps if start <= time_s < end), None)


def _host_at(trace: Trace, begin: float, end: float) -> str:
    """Return the host's call with the largest share of the gap, if any."""
    overlap = np.minimum(trace.host_end_s, end) - np.maximum(trace.host_start_s, begin)
    if len(overlap) == 0 or overlap.max() <= 0:
        return ""
    return shown_name(trace.host_name[int(overlap.argmax())])


# Shares of the time above which a remark is worth a line.
_IDLE, _EXPOSED, _COPIES, _OTHER = 0.1, 0.05, 0.1, 0.35
# Kernels shorter than a host's launch of one.
_LAUNCH_S = 10e-6


def says(analysis: Analysis) -> list[str]:
    """Return remarks on the figures, one line each."""
    span = analysis.span_s or 1.0
    lines = []
    if analysis.idle_s / span >= _IDLE:
        who = "devices do" if analysis.trace.on_device else "the host does"
        line = f"{who} nothing for {analysis.idle_s / span:.0%} of the time"
        if analysis.trace.on_device and 0 < analysis.kernel_median_s < _LAUNCH_S:
            line += (
                f"; half of all kernels are shorter than {analysis.kernel_median_s * 1e6:.1f} us, so that "
                "the host cannot keep up: larger micro-batches, compiled layers or graphs"
            )
        lines.append(line)
    if analysis.exposed_s / span >= _EXPOSED:
        share = analysis.exposed_s / max(analysis.collective_s, 1e-12)
        lines.append(
            f"{analysis.exposed_s / span:.0%} of the time only collectives run; {share:.0%} of them is not "
            "overlapped: fewer ranks per group, overlap, or another layout"
        )
    work = sum(analysis.class_s.values()) or 1.0
    if analysis.class_s["memory copy"] / work >= _COPIES:
        share = analysis.class_s["memory copy"] / work
        lines.append(f"copies are {share:.0%} of the work: offloading, or data that is not pinned")
    if analysis.class_s["other"] / work >= _OTHER:
        share = analysis.class_s["other"] / work
        lines.append(f"{share:.0%} of the work is neither products nor attention: fused or compiled layers")
    lines += _of_ranks(analysis)
    return lines


def _of_ranks(analysis: Analysis) -> list[str]:
    trace = analysis.trace
    lines = []
    if trace.world_size is not None and trace.rank is not None:
        sizes = sorted({group.size for group in trace.groups if 1 < group.size < trace.world_size})
        text = f"rank {trace.rank} of {trace.world_size}"
        if sizes:
            text += f"; groups of {', '.join(map(str, sizes))} ranks besides: axes of the mesh"
        lines.append(text)
    if len(analysis.step_s) > 1:
        lengths = sorted(analysis.step_s.values())
        median = float(np.median(lengths))
        if median > 0 and lengths[-1] > 1.5 * median:
            slowest = max(analysis.step_s, key=lambda number: analysis.step_s[number])
            lines.append(f"step {slowest} took {lengths[-1] / median:.1f} times the median")
    return lines
