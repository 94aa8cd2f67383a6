"""The page of `weft explain TRACE --report`: what a job's steps lose, and by whom."""

from __future__ import annotations

from functools import partial
from html import escape

import numpy as np

from weft.describe.units import counted, format_seconds
from weft.doors.trace.job.losses import Losses
from weft.doors.trace.job.remarks import remarks
from weft.program.kinds import is_compute
from weft.timeline.timeline import Timeline
from weft.web.charts.bars import Bar, bars_svg
from weft.web.charts.heat_map import HeatMap, heat_map_svg
from weft.web.charts.timeline import timeline_svg
from weft.web.pages.page import page_html, picture_section, section_html, table_section

_MOST_COLUMNS = 96
_MEASURED, _CHANGED, _IDEAL = "#8a8f98", "#2b6cd4", "#1a7f55"
OPERATION_HEAD = ("group", "step against an ideal one")


def job_page(losses: Losses) -> str:
    """Return a self-contained page: remarks, what-ifs, a heat map, timelines and tables."""
    operations = losses.operations
    lines = "".join(f"<li>{escape(line)}</li>" for line in (*remarks(losses), *operations.left_out))
    sections = [
        section_html("remarks", "What it says", f"<ul>{lines}</ul>"),
        picture_section("what-if", "What if", partial(bars_svg, what_if_bars(losses))),
        picture_section("heat", "Passes by stage and replica", partial(heat_map_svg, worker_map(losses))),
        picture_section("measured", "The median step", partial(timeline_svg, passes_only(losses.measured))),
        picture_section("ideal", "The ideal step", partial(timeline_svg, losses.ideal)),
        table_section("groups", "Keep one group", OPERATION_HEAD, group_rows(losses)),
    ]
    counts = ((operations.stages, "stage"), (operations.replicas, "replica"), (len(operations.steps), "step"))
    words = ", ".join(counted(*each) for each in counts)
    return page_html(f"Trace {operations.name}", words, sections)


def what_if_bars(losses: Losses) -> list[Bar]:
    """Return the step as measured, after each change, and ideal."""
    measured_s = float(losses.measured_s.mean())
    steps = [("measured", measured_s, _MEASURED)]
    steps += [(name, seconds, _CHANGED) for name, seconds in losses.what_if_s.items()]
    steps += [("all as usual", losses.ideal_s, _IDEAL)]
    return [
        Bar(
            name=name,
            value=seconds,
            text=f"{format_seconds(seconds)} ({seconds / measured_s - 1.0:+.0%})",
            colour=colour,
        )
        for name, seconds, colour in steps
    ]


def worker_map(losses: Losses) -> HeatMap:
    """Return the passes of each stage of each replica over the median of all; of many the slowest ones."""
    operations, found = losses.operations, losses.workers
    seconds = np.zeros((operations.stages, operations.replicas))
    for one in found:
        seconds[one.stage, one.replica] = one.passes_s
    usual = float(np.median(seconds))
    order = np.argsort(-seconds.max(axis=0), kind="stable")[:_MOST_COLUMNS]
    replicas = np.sort(order).tolist()
    left = operations.replicas - len(replicas)
    note = f"100 %: {format_seconds(usual)} forward and backward per step, the median"
    return HeatMap(
        rows=[f"stage {stage}" for stage in range(operations.stages)],
        columns=[f"replica {replica}" for replica in replicas],
        values=[[seconds[stage, one] / usual for one in replicas] for stage in range(operations.stages)],
        words=[
            [f"stage {stage}, replica {one}: {format_seconds(seconds[stage, one])}" for one in replicas]
            for stage in range(operations.stages)
        ],
        note=f"{note}; {left} faster replicas are left out" if left else note,
    )


def passes_only(timeline: Timeline) -> Timeline:
    """Return the computations: recorded messages and collectives contain the time that they wait."""
    return timeline.take(is_compute(timeline.kind))


def group_rows(losses: Losses) -> list[tuple[str, str]]:
    """Return each group that alone takes its own times, and the step over the ideal one."""
    groups = [
        *((f"stage {one}", value) for one, value in losses.by_stage.items()),
        *((f"replica {one}", value) for one, value in losses.by_replica.items()),
        *losses.by_operation.items(),
    ]
    return [(name, f"{value - 1.0:+.2%}") for name, value in sorted(groups, key=lambda one: -one[1])]
