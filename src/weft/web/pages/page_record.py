"""The record of a report inside its page, of bounded size.

A run of any length gives a page of bounded size. The page embeds a few measured steps, and the first ranks
of very wide timelines. Thinned curves keep their peaks. The page names its omissions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weft.program.arrays import Ids, Ints
from weft.program.kinds import KINDS
from weft.timeline.timeline import Timeline, label
from weft.web.charts.picture import kind_colour
from weft.web.charts.timeline import Lane, lane_of_rows, lane_table, shade_of_rows
from weft.web.pages.report_data import Points, RankMemory, ReportData, chosen_steps, take_step

Record = dict[str, object]

MAXIMUM_ROWS = 12_000
MAXIMUM_POINTS = 1_200
MAXIMUM_LIVE_CURVES = 8


def page_record(report: ReportData) -> Record:
    """Return the data of the page's script: plain numbers and strings, times in ticks of `tick_ns`."""
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
        "charts": [
            {
                "section": one.name,
                "title": one.title,
                "xName": one.chart.x_name,
                "curves": [{"name": curve.name, "points": thin(curve.points)} for curve in one.chart.curves],
            }
            for one in report.sections
            if one.chart is not None
        ],
    }


def _live_curves(memory: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the `MAXIMUM_LIVE_CURVES` ranks with the highest predicted peaks, in order of rank."""
    curves = [one for one in memory if one.live]
    curves.sort(key=lambda one: (-max(bytes_ for _, bytes_ in one.live), one.rank))
    return sorted(curves[:MAXIMUM_LIVE_CURVES], key=lambda one: one.rank)


def timeline_record(report: ReportData) -> Record:
    """Return lanes, instructions and times of the predicted step and the chosen measured steps."""
    chosen = chosen_steps(report.measured) if report.measured is not None else {}
    steps = {step: take_step(report.measured, step) for step in chosen} if report.measured is not None else {}
    shown = [
        timeline for timeline in (report.predicted, *steps.values()) if timeline is not None and len(timeline)
    ]
    ranks = 1 + max(int(timeline.rank.max()) for timeline in shown)
    shown_ranks = _ranks_within(shown, ranks)
    shown = [timeline.take(timeline.rank < shown_ranks) for timeline in shown]
    lanes = lane_table(shown)
    ids, instructions = _join(shown, lanes)
    span = max(int(timeline.end_ns.max() - timeline.start_ns.min()) for timeline in shown)
    symbol = {kind.stream: kind.symbol for kind in reversed(list(KINDS))}
    tick_ns = 10 ** max(0, len(str(span)) - 7)
    occurrences = [_occurrences(timeline, ids, tick_ns) for timeline in shown]
    predicted = occurrences.pop(0) if report.predicted is not None and len(report.predicted) else None
    return {
        "tickNs": tick_ns,
        "ranks": ranks,
        "shownRanks": shown_ranks,
        "kinds": [{"name": kind.name, "colour": kind_colour(kind.name)} for kind in KINDS],
        "lanes": [
            {"rank": lane.rank, "stream": lane.stream, "symbol": symbol[lane.stream]} for lane in lanes
        ],
        "instructions": instructions,
        "predicted": predicted,
        "measured": [
            {"step": step, "reasons": reasons, **record}
            for (step, reasons), record in zip(chosen.items(), occurrences, strict=True)
        ],
    }


def _ranks_within(shown: Sequence[Timeline], ranks: int) -> int:
    """Return the number of first ranks with at most `MAXIMUM_ROWS` rows together, at least one."""
    rows = sum(np.bincount(timeline.rank, minlength=ranks) for timeline in shown)
    return max(1, int(np.searchsorted(np.cumsum(rows), MAXIMUM_ROWS, side="right")))


def _join(shown: Sequence[Timeline], lanes: tuple[Lane, ...]) -> tuple[Ids, Record]:
    """Return the sorted ids of the instructions of all shown timelines, each once, and their record."""
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
    return ids, record


_STATIC_COLUMNS = ("id", "kind", "stage", "micro_batch", "bytes", "position")
_JSON_NAME = {"micro_batch": "microBatch"}


def _occurrences(timeline: Timeline, ids: Ids, tick_ns: int) -> Record:
    """Return the times of one step's instructions, in ticks since the step's first start."""
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
    """Return at most about `maximum` points: the lowest and the highest of each of equal buckets.

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
