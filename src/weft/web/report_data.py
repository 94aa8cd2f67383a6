"""What a report shows (`ReportData`) and the bounded record that travels inside the page.

A run of any length gives a page of bounded size: of the measured steps only a few are embedded, of very wide
timelines only the first ranks, and curves are thinned so that their peaks stay. The page says what it omits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.errors import InputError, Violation
from weft.program.kinds import KINDS
from weft.program.program import Ids, Ints
from weft.timeline.compare import WARM_UP_STEPS, compare
from weft.timeline.figures import busy_by_kind
from weft.timeline.medians import step_times_s
from weft.timeline.streams import label
from weft.timeline.timeline import Timeline
from weft.web.colours import kind_colour
from weft.web.lanes import Lane, lane_of_rows, lane_table, shade_of_rows

Record = dict[str, object]
Points = Sequence[tuple[float, float]]

LAST_STEPS = 3
MEDIAN = "median"
MAXIMUM_ROWS = 12_000
MAXIMUM_POINTS = 1_200
MAXIMUM_LIVE_CURVES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """The predicted time of one steady step and its 90 % interval, in seconds."""

    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank in bytes; None where nothing is known.

    `live` is the predicted curve over one step: (seconds since the start of the step, live bytes).
    """

    rank: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    capacity_bytes: int | None = None
    live: Points = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything a report is made of; empty parts are left out of the page.

    Attributes:
        run, model, cluster: names, shown as they are.
        plan: the plan in words, as rows (what, decision).
        predicted: a timeline of one steady step.
        measured: a timeline of as many steps as were recorded.
        interval: the predicted step time.
        step_times: (step, seconds) of every step of the run.
        losses, held_out: (step, nats per token); a value that is not finite is drawn as a gap.
        memory: one entry per rank.
        summary: what `summary.json` holds, shown as a table.
    """

    run: str
    model: str = ""
    cluster: str = ""
    plan: Sequence[tuple[str, str]] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
    interval: StepInterval | None = None
    step_times: Points = ()
    losses: Points = ()
    held_out: Points = ()
    memory: Sequence[RankMemory] = ()
    summary: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        timelines = (self.predicted, self.measured)
        plans = {timeline.plan_id for timeline in timelines if timeline is not None}
        if len(plans) > 1:
            raise InputError(
                Violation(
                    "report",
                    f"predicted and measured timelines belong to two plans: {' and '.join(sorted(plans))}",
                )
            )

    @property
    def measured_step_s(self) -> float | None:
        """Median seconds of a step after the warm-up; of all steps where the run is shorter than that."""
        times = [seconds for _, seconds in self.step_times if math.isfinite(seconds)]
        return float(np.median(times[WARM_UP_STEPS:] or times)) if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """One line of the table per kind: count and busy seconds of one step, all ranks together."""

    kind: str
    count: int
    predicted_s: float | None
    measured_s: float | None


def page_record(report: ReportData) -> Record:
    """What the page's script draws: plain numbers and strings, times in ticks of `tick_ns`."""
    timelines = [timeline for timeline in (report.predicted, report.measured) if timeline is not None]
    return {
        "timeline": timeline_record(report) if any(len(timeline) for timeline in timelines) else None,
        "loss": thin(report.losses),
        "heldOut": thin(report.held_out),
        "stepTimes": thin(report.step_times),
        "measuredStep": report.measured_step_s,
        "interval": report.interval
        and [report.interval.step_s, report.interval.low_s, report.interval.high_s],
        "memory": [
            {
                "rank": memory.rank,
                "predicted": memory.predicted_bytes,
                "measured": memory.measured_bytes,
                "capacity": memory.capacity_bytes,
            }
            for memory in report.memory
        ],
        "live": [
            {"rank": memory.rank, "points": thin(memory.live)} for memory in _live_curves(report.memory)
        ],
    }


def _live_curves(memory: Sequence[RankMemory]) -> list[RankMemory]:
    """The ranks with the highest predicted peaks, in order of rank."""
    curves = [one for one in memory if one.live]
    curves.sort(key=lambda one: (-max(bytes_ for _, bytes_ in one.live), one.rank))
    return sorted(curves[:MAXIMUM_LIVE_CURVES], key=lambda one: one.rank)


def timeline_record(report: ReportData) -> Record:
    """Lanes, instructions and times of the predicted step and of the chosen measured steps."""
    chosen = chosen_steps(report.measured) if report.measured is not None else {}
    steps = {step: take_step(report.measured, step) for step in chosen} if report.measured is not None else {}
    shown = [
        timeline for timeline in (report.predicted, *steps.values()) if timeline is not None and len(timeline)
    ]
    ranks = 1 + max(int(timeline.rank.max()) for timeline in shown)
    shown_ranks = _ranks_within(shown, ranks)
    shown = [timeline.take(timeline.rank < shown_ranks) for timeline in shown]
    lanes = lane_table(shown)
    joined = _join(shown, lanes)
    span = max(int(timeline.end_ns.max() - timeline.start_ns.min()) for timeline in shown)
    tick_ns = 10 ** max(0, len(str(span)) - 7)
    occurrences = [_occurrences(timeline, joined.ids, tick_ns) for timeline in shown]
    predicted = occurrences.pop(0) if report.predicted is not None and len(report.predicted) else None
    return {
        "tickNs": tick_ns,
        "ranks": ranks,
        "shownRanks": shown_ranks,
        "kinds": [{"name": kind.name, "colour": kind_colour(kind.name)} for kind in KINDS],
        "lanes": [
            {"rank": lane.rank, "stream": lane.stream, "symbol": _stream_symbol(lane)} for lane in lanes
        ],
        "instructions": joined.record,
        "predicted": predicted,
        "measured": [
            {"step": step, "reasons": reasons, **record}
            for (step, reasons), record in zip(chosen.items(), occurrences, strict=True)
        ],
    }


def _stream_symbol(lane: Lane) -> str:
    return next(kind.symbol for kind in KINDS if kind.stream == lane.stream)


def chosen_steps(measured: Timeline) -> dict[int, list[str]]:
    """Which measured steps a page embeds, in order, each with the reasons why.

    The first, the one of median length and the slowest after the warm-up, and the last few.
    """
    steps = np.unique(measured.step)
    if not len(steps):
        return {}
    lengths = step_times_s(measured)
    settled = np.flatnonzero(np.arange(len(steps)) >= min(WARM_UP_STEPS, len(steps) - 1))
    by_length = settled[np.argsort(lengths[settled], kind="stable")]
    reasons: dict[int, list[str]] = {}
    reasons.setdefault(int(steps[by_length[(len(by_length) - 1) // 2]]), []).append(MEDIAN)
    reasons.setdefault(int(steps[0]), []).append("first")
    reasons.setdefault(int(steps[by_length[-1]]), []).append("slowest after warm-up")
    for step in steps[-LAST_STEPS:]:
        reasons.setdefault(int(step), [])
    reasons[int(steps[-1])].append("last")
    return dict(sorted(reasons.items()))


def take_step(timeline: Timeline, step: int) -> Timeline:
    return timeline.take(timeline.step == step)


def _ranks_within(shown: Sequence[Timeline], ranks: int) -> int:
    """How many ranks fit into the bound on embedded rows; always at least one."""
    rows = sum(np.bincount(timeline.rank, minlength=ranks) for timeline in shown)
    return max(1, int(np.searchsorted(np.cumsum(rows), MAXIMUM_ROWS, side="right")))


@dataclass(frozen=True, slots=True)
class _Joined:
    """The instructions of all shown timelines, each once; `ids` are sorted."""

    ids: Ids
    record: Record


def _join(shown: Sequence[Timeline], lanes: tuple[Lane, ...]) -> _Joined:
    every = {
        name: np.concatenate([getattr(timeline, name) for timeline in shown]) for name in _STATIC_COLUMNS
    }
    lane = np.concatenate([lane_of_rows(timeline, lanes) for timeline in shown])
    shade = np.concatenate([shade_of_rows(timeline) for timeline in shown])
    ids, first = np.unique(every["id"], return_index=True)
    kinds, stages, micro_batches = (every[name][first] for name in ("kind", "stage", "micro_batch"))
    record: Record = {
        "id": [f"{identity:016x}" for identity in ids.tolist()],
        "label": [
            label(kind, stage, micro_batch)
            for kind, stage, micro_batch in zip(
                kinds.tolist(), stages.tolist(), micro_batches.tolist(), strict=True
            )
        ],
        "lane": lane[first].tolist(),
        "shade": [round(value, 2) for value in shade[first].tolist()],
    }
    record |= {_JSON_NAME.get(name, name): every[name][first].tolist() for name in _STATIC_COLUMNS[1:]}
    return _Joined(ids, record)


_STATIC_COLUMNS = ("id", "kind", "stage", "micro_batch", "bytes", "position")
_JSON_NAME = {"micro_batch": "microBatch"}


def _occurrences(timeline: Timeline, ids: Ids, tick_ns: int) -> Record:
    """When each instruction of one step ran, in ticks since the step's first start."""
    origin = int(timeline.start_ns.min())

    def ticks(column: Ints) -> list[int]:
        values: list[int] = ((column - origin) // tick_ns).tolist()
        return values

    return {
        "row": np.searchsorted(ids, timeline.id).tolist(),
        "posted": ticks(timeline.posted_ns),
        "start": ticks(timeline.start_ns),
        "end": ticks(timeline.end_ns),
    }


def thin(points: Points, maximum: int = MAXIMUM_POINTS) -> list[tuple[float, float | None]]:
    """At most about `maximum` of the points: the lowest and the highest of each of equal buckets.

    Values that are not finite become None.
    """
    clean = [(x, y if math.isfinite(y) else None) for x, y in points]
    if len(clean) <= maximum:
        return clean
    kept = {0, len(clean) - 1}
    for bucket in np.array_split(np.arange(len(clean)), maximum // 2):
        known = [index for index in bucket.tolist() if clean[index][1] is not None]
        kept |= {int(bucket[0])} if not known else set()
        if known:
            kept.add(min(known, key=lambda index: float(points[index][1])))
            kept.add(max(known, key=lambda index: float(points[index][1])))
    return [clean[index] for index in sorted(kept)]


def kind_rows(report: ReportData) -> list[KindRow]:
    """Busy time per kind in one step: predicted, and the median over the measured steps after the warm-up."""
    predicted, measured = report.predicted, report.measured
    if predicted is not None and measured is not None and len(predicted) and len(measured):
        return [
            KindRow(
                kind=pair.kind,
                count=pair.instructions,
                predicted_s=pair.predicted_total_s,
                measured_s=pair.measured_total_s,
            )
            for pair in compare(predicted, measured).kinds
        ]
    if predicted is not None and len(predicted):
        return [
            KindRow(kind=kind, count=count, predicted_s=seconds, measured_s=None)
            for kind, count, seconds in _kinds_of(predicted)
        ]
    if measured is not None and len(measured):
        middle = next(step for step, reasons in chosen_steps(measured).items() if MEDIAN in reasons)
        return [
            KindRow(kind=kind, count=count, predicted_s=None, measured_s=seconds)
            for kind, count, seconds in _kinds_of(take_step(measured, middle))
        ]
    return []


def _kinds_of(timeline: Timeline) -> list[tuple[str, int, float]]:
    count = np.bincount(timeline.kind, minlength=len(KINDS)).tolist()
    seconds = busy_by_kind(timeline)
    return [(kind.name, count[code], seconds[kind.name]) for code, kind in enumerate(KINDS) if count[code]]
