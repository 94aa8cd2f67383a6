"""The record of a report inside its page, of bounded size.

A run of any length gives a page of bounded size. The page embeds a few measured steps, and the first ranks
of very wide timelines. Thinned curves keep their peaks. The page names its omissions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from weft.program.arrays import Ids, Ints
from weft.program.kinds import KINDS
from weft.timeline.folded import folded_ranks, leading_rows
from weft.timeline.timeline import Timeline, label
from weft.web.charts.picture import kind_colour
from weft.web.charts.timeline import Lane, lane_of_rows, lane_table, shade_of_rows
from weft.web.pages.report_data import Points, RankMemory, ReportData, chosen_steps, take_step
from weft.web.rows.plan import ranks_text

Record = dict[str, object]
Thinned = list[tuple[float, float | None]]

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
            {"name": ranks_text(ranks), "predicted": predicted, "measured": measured, "capacity": capacity}
            for ranks, predicted, measured, capacity in _equal_memory(report.memory)
        ],
        "live": [
            {"name": ranks_text(ranks), "points": points} for ranks, points in _live_curves(report.memory)
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


def _equal_memory(
    memory: Sequence[RankMemory],
) -> Iterator[tuple[list[int], int | None, int | None, int | None]]:
    """Yield the ranks of equal prediction and capacity, with both and the most that any of them measured."""
    equal: dict[tuple[int | None, int | None], list[RankMemory]] = defaultdict(list)
    for one in memory:
        equal[one.predicted_bytes, one.capacity_bytes].append(one)
    for (predicted, capacity), some in equal.items():
        measured = [one.measured_bytes for one in some if one.measured_bytes is not None]
        yield [one.rank for one in some], predicted, max(measured, default=None), capacity


def _live_curves(memory: Sequence[RankMemory]) -> list[tuple[list[int], Thinned]]:
    """Return the `MAXIMUM_LIVE_CURVES` curves with the highest predicted peaks, and the ranks of each."""
    equal: dict[tuple[tuple[float, float | None], ...], list[int]] = defaultdict(list)
    for one in memory:
        if one.live:
            equal[tuple(thin(one.live))].append(one.rank)
    curves = sorted(equal.items(), key=lambda one: -max(size or 0.0 for _, size in one[0]))
    found = [(ranks, list(points)) for points, ranks in curves[:MAXIMUM_LIVE_CURVES]]
    return sorted(found, key=lambda one: one[0])


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
        "kinds": [{"name": kind.words, "colour": kind_colour(kind.name)} for kind in KINDS],
        "lanes": [
            {"rank": lane.rank, "stream": lane.stream, "symbol": symbol[lane.stream]} for lane in lanes
        ],
        "instructions": instructions,
        "predicted": predicted and predicted | _folded(shown[0], ids),
        "measured": [
            {"step": step, "reasons": reasons, **record}
            for (step, reasons), record in zip(chosen.items(), occurrences, strict=True)
        ],
    }


def _folded(timeline: Timeline, ids: Ids) -> Record:
    """Return names of equal ranks by their first rank, and each instruction's equal one on that rank.

    Nothing if no ranks are equal.
    """
    folded = folded_ranks(timeline)
    if all(len(group) == 1 for group in folded):
        return {}
    row = np.searchsorted(ids, timeline.id)
    twin = np.arange(len(ids))
    twin[row] = row[leading_rows(timeline)]
    return {"names": {group[0]: ranks_text(group) for group in folded}, "twin": twin.tolist()}


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


def thin(points: Points, maximum: int = MAXIMUM_POINTS) -> Thinned:
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
