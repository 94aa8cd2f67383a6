"""A run as one self-contained HTML file that needs no network and no other file.

`write_report` embeds template, styles and scripts from `static/`. Names of runs and models are data. Markup
escapes them, and scripts get them as JSON that cannot end its element. A content security policy admits only
the page's own scripts.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.describe.plan import precision_words, shared_out
from weft.describe.synchronisation import sync_words
from weft.describe.units import counted, format_count, format_seconds
from weft.files import write_whole
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import BY_SOURCE, Table, sections_of
from weft.planning.residuals import measured_peaks
from weft.predict.predict import live_curve
from weft.program.kinds import kind_words
from weft.timeline.figures import error_text, prediction_error
from weft.timeline.timeline import under_current_id
from weft.training.directory.run_directory import RunDirectory
from weft.web.charts.picture import STYLE, kind_colour
from weft.web.pages.page import policy_hash, scripted_page, scrolling, section_html
from weft.web.pages.page_record import page_record
from weft.web.pages.plan import stage_graph_section
from weft.web.pages.report_data import KindRow, RankMemory, ReportData, StepInterval, kind_rows
from weft.web.rows.plan import batch_text, stage_names
from weft.web.rows.stage_graph import stage_graph
from weft.web.rows.summary import MEMORY_HEAD, memory_rows, summary_rows

_SCRIPTS = ("draw.js", "charts.js", "timeline.js", "report.js", "save.js")
_KIND_HEAD = ("kind", "count", "predicted", "measured", "error")
_SOURCE_HEAD = ("source", "nats per target", "perplexity")


def write_report(path: str | os.PathLike[str], report: ReportData) -> None:
    """Write the report as a page; an existing file is replaced atomically.

    Raises:
        OSError: if the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, report_html(report))


def report_html(report: ReportData) -> str:
    """Return the page of a report as text."""
    parts = {
        "title": escape(f"{report.run} - weft"),
        "run": escape(report.run),
        "subtitle": escape(" on ".join(name for name in (report.model, report.cluster) if name)),
        "tiles": _tiles(report),
        "stage_graph": "" if report.stage_graph is None else stage_graph_section(report.stage_graph),
        "memory": _memory_section(report),
        "tables": _tables(report),
        "picture_hash": policy_hash(STYLE),
    }
    return scripted_page("report.html", ("report.css",), _SCRIPTS, page_record(report), parts)


def _tiles(report: ReportData) -> str:
    tiles: list[tuple[str, str, str, str]] = []
    interval, measured = report.interval, report.measured_step_s
    if interval is not None:
        detail = f"90 %: {format_seconds(interval.low_s)} to {format_seconds(interval.high_s)}"
        tiles.append(("predicted step", format_seconds(interval.step_s), detail, ""))
    if measured is not None:
        tiles.append(("measured step", format_seconds(measured), "median after the warm-up", ""))
    if interval is not None and measured is not None:
        inside = interval.low_s <= measured <= interval.high_s
        verdict = "inside the interval" if inside else "outside the interval"
        error = error_text(prediction_error(interval.step_s, measured))
        tiles.append(("error of the prediction", error, verdict, "good" if inside else "bad"))
    if report.held_out:
        first, last = report.held_out[0][1], report.held_out[-1][1]
        tiles.append(("held-out loss", f"{last:.4g}", f"per target, from {first:.4g}", ""))
    if isinstance(tokens := report.summary.get("tokens_per_s"), int | float):
        steps = report.summary.get("steps")
        tiles.append(
            (
                "tokens per second",
                format_count(tokens),
                f"{steps} steps" if steps is not None else "",
                "",
            )
        )
    items = "".join(
        f'<li><span class="label">{escape(label)}</span><span class="value {tone}">{escape(value)}</span>'
        f'<span class="detail">{escape(detail)}</span></li>'
        for label, value, detail, tone in tiles
    )
    return f'<ul class="tiles">{items}</ul>' if items else ""


def _tables(report: ReportData) -> str:
    sections: list[str] = []
    if report.plan:
        sections.append(_section("plan", "Plan", _rows(report.plan)))
    if rows := _kind_table(report):
        title = "Busy time per kind <small>one step, all ranks together</small>"
        sections.append(_section("kinds", title, rows, _KIND_HEAD))
    if report.by_source:
        rows = _cells((name, *_losses(one)) for name, one in report.by_source.items())
        sections.append(_section("sources", "Held-out loss by source", rows, _SOURCE_HEAD))
    sections += [
        _section(one.name, escape(one.title), _rows(one.rows), chart=one.chart is not None)
        for one in report.sections
    ]
    if rows := _rows(list(summary_rows(report.summary))):
        sections.append(_section("summary", "Summary", rows))
    return "\n".join(sections)


def _section(name: str, title: str, rows: str, head: Sequence[str] = (), *, chart: bool = False) -> str:
    picture = '<div class="chart"></div>' if chart else ""
    return section_html(name, title, picture + scrolling(name, _table(rows, head)), saved=chart)


def _table(rows: str, head: Sequence[str], caption: str = "") -> str:
    columns = "".join(
        f'<th scope="col"{" class=number" if index else ""}>{escape(text)}</th>'
        for index, text in enumerate(head)
    )
    above = f"<caption>{escape(caption)}</caption>" * bool(caption)
    table_head = f"<thead><tr>{columns}</tr></thead>" if head else ""
    return f"<table>{above}{table_head}<tbody>{rows}</tbody></table>"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>' for label, text in rows
    )


def _kind_table(report: ReportData) -> str:
    lines = []
    for row in kind_rows(report):
        swatch = (
            '<svg class="swatch" viewBox="0 0 11 11" aria-hidden="true">'
            f'<rect width="11" height="11" rx="2" fill="{kind_colour(row.kind)}"/></svg>'
        )
        cells = (
            f"{row.count:,}",
            _or_dash(format_seconds, row.predicted_s),
            _or_dash(format_seconds, row.measured_s),
            _error_or_dash(row),
        )
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        name = escape(kind_words(row.kind))
        lines.append(f'<tr><th scope="row">{swatch}{name}</th>{numbers}</tr>')
    return "".join(lines)


def _error_or_dash(row: KindRow) -> str:
    if row.predicted_s is None or not row.measured_s:
        return "-"
    return error_text(prediction_error(row.predicted_s, row.measured_s))


def _memory_section(report: ReportData) -> str:
    """Return the bars of all ranks, which the script draws, and the parts of one rank's peak as a table."""
    if not any(one.predicted_bytes or one.measured_bytes for one in report.memory):
        return ""
    inside = '<div class="chart"></div>'
    if report.memory_rows:
        caption = f"The peak of rank {report.memory_of}, part by part"
        inside += scrolling("memory", _table(_cells(report.memory_rows), MEMORY_HEAD, caption))
    return section_html(
        "memory", "Memory <small>peak; of equal ranks, the fullest</small>", inside, saved=True
    )


def _losses(source: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_or_dash("{:.4g}".format, source.get(name)) for name in ("loss", "perplexity"))


def _cells(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows of a table with a label and figures."""
    return "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f'<td class="number">{escape(figure)}</td>' for figure in figures)
        + "</tr>"
        for label, *figures in rows
    )


def _or_dash(text: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else text(value)


def write_run_report(directory: RunDirectory, planned: PlannedJob) -> Path:
    """Write `report.html` and the tables of its sections into the run directory, and return its path."""
    path = directory.path / "report.html"
    report = run_report_data(directory, planned)
    write_report(path, report)
    for section in report.sections:
        if section.table is not None:
            write_whole(directory.path / f"{section.name}.csv", _csv(section.table))
    return path


def _csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.head, *table.rows])
    return text.getvalue()


def run_report_data(directory: RunDirectory, planned: PlannedJob) -> ReportData:
    """Return the contents of the page of one finished run."""
    metrics = directory.metrics()
    summary = directory.summary()
    sources = summary.pop(BY_SOURCE, {})
    prediction, fullest = planned.prediction, planned.fullest_rank
    parts = planned.peak_parts(fullest)
    measured = under_current_id(directory.measured(), planned.plan)
    return ReportData(
        run=directory.name,
        model=planned.plan.model,
        cluster=planned.plan.cluster,
        plan=plan_in_words(planned),
        stage_graph=stage_graph(planned),
        predicted=under_current_id(directory.predicted(), planned.plan),
        measured=measured,
        interval=StepInterval(
            step_s=prediction.step_s, low_s=prediction.step_low_s, high_s=prediction.step_high_s
        ),
        step_times=[(row["step"], row["step_s"]) for row in metrics],
        losses=[(row["step"], row["loss"]) for row in metrics],
        held_out=[(row["step"], row["held_out_loss"]) for row in directory.held_out()],
        memory=_memory(planned, measured_peaks(summary)),
        memory_of=fullest,
        memory_rows=memory_rows({one.name: round(one.value) for one in parts}, summary, fullest),
        summary=summary,
        by_source=sources,
        sections=sections_of(planned, metrics, sources, directory.events(), measured),
    )


def plan_in_words(planned: PlannedJob) -> list[tuple[str, str]]:
    """Return the plan's decisions as (name, decision) rows."""
    plan = planned.plan
    return [
        ("plan", plan.plan_id),
        ("mesh", " x ".join(f"{axis} {degree}" for axis, degree in plan.axes.items())),
        ("schedule", plan.schedule.name),
        ("global batch", batch_text(plan)),
        ("micro-batches", f"{plan.micro_batches} of {counted(plan.micro_batch_size, 'sample')}"),
        ("precision", precision_words(plan)),
        ("sharding", shared_out(plan)),
        ("synchronisation", sync_words(plan.sync)),
        *stage_names(plan, planned.problem.job.graph.layers),
    ]


def _memory(planned: PlannedJob, measured_bytes: Sequence[int]) -> list[RankMemory]:
    return [
        RankMemory(
            rank=rank,
            predicted_bytes=predicted,
            measured_bytes=measured_bytes[rank] if rank < len(measured_bytes) else None,
            capacity_bytes=planned.problem.job.cluster.device_of(rank).memory_bytes,
            live=live_curve(planned.program, planned.predicted, rank),
        )
        for rank, predicted in enumerate(planned.prediction.peak_bytes)
    ]
