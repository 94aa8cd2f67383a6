"""One plan as a page (`weft show --report`), and as a piece of HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape

import numpy as np

from weft.describe.plan import Plan, precision_words, shared_out
from weft.describe.prediction import Prediction
from weft.describe.units import counted, format_seconds
from weft.planning.planned_job import PlannedJob
from weft.timeline.timeline import Timeline
from weft.web.charts.cluster import cluster_svg, memory_svg
from weft.web.charts.stage_graph import stage_graph_svg
from weft.web.charts.timeline import timeline_svg
from weft.web.pages.page import json_for_script, page_html, picture_section, section_html, table_section
from weft.web.rows.placed_layers import placed_layers
from weft.web.rows.plan import BREAKDOWN_HEAD, STAGE_HEAD, batch_text, breakdown_rows, stage_rows
from weft.web.rows.stage_graph import StageDiagram, stage_graph


def show_page(planned: PlannedJob) -> str:
    """Return a self-contained page of a plan and its prediction."""
    plan, job, prediction = planned.plan, planned.problem.job, planned.prediction
    cluster = job.cluster
    subtitle = (
        f"plan {plan.plan_id}: {batch_text(plan)} in micro-batches of "
        f"{plan.micro_batch_size}, {plan.schedule.name}, {shared_out(plan)}, "
        f"{precision_words(plan)}; a step of {format_seconds(prediction.step_s)} "
        f"({format_seconds(prediction.step_low_s)} to {format_seconds(prediction.step_high_s)}), "
        f"times from {prediction.source}"
    )
    used = f"{plan.ranks} of {counted(cluster.ranks, 'device')} used"
    graph = stage_graph(planned)
    sections = [
        picture_section("cluster", f"{cluster.name}: {used}", partial(cluster_svg, cluster, plan)),
        table_section(
            "stages",
            "Stages",
            STAGE_HEAD,
            stage_rows(plan, prediction, cluster, job.graph.layers),
            words=STAGE_HEAD[:4],
        ),
        *(() if graph is None else (stage_graph_section(graph), placed_layers_section(planned))),
        picture_section(
            "memory",
            "Predicted peak memory of each rank",
            partial(memory_svg, prediction.peak_bytes, planned.memory_bytes),
        ),
        table_section(
            "breakdown", "Where a step goes", BREAKDOWN_HEAD, breakdown_rows(planned.step_breakdown)
        ),
        picture_section(
            "timeline",
            "One step, predicted",
            partial(timeline_svg, planned.predicted.simulation.timeline),
        ),
    ]
    scripts = () if graph is None else ("draw.js", "placed_layers.js")
    return page_html(f"{plan.model} on {plan.cluster}", subtitle, sections, scripts)


def stage_graph_section(graph: StageDiagram) -> str:
    """Return the picture of a stage graph below its title."""
    stages, longest = len(graph.nodes), max(graph.to_end)
    title = f"Graph of {stages} stages, {longest} on its longest path"
    return picture_section("stage-graph", title, partial(stage_graph_svg, graph))


# The kinds of layers with most time have a colour each, others the last one.
LAYER_COLOURS = ("#2b6cd4", "#1a7f55", "#7a4fc0", "#b8473d", "#a85a14", "#14807c", "#a0468f", "#5c6470")

LAYER_HINT = (
    "Point at a layer, or choose one by arrows. Wheel, + and - zoom; a drag moves; 0 shows all. "
    "Darker: every other stage of a rank."
)


def placed_layers_section(planned: PlannedJob) -> str:
    """Return the picture of single layers on their ranks, with their data for `placed_layers.js`."""
    placed = placed_layers(planned)
    layers, last = len(placed.names), len(LAYER_COLOURS) - 1
    title = f"{layers:,} layers on {len(placed.lanes)} ranks: the forward pass of the first micro-batch"
    named = [*placed.kinds[:last], *(("others",) if len(placed.kinds) > last else ())]
    legend = "".join(
        f'<li><span style="background:{colour}"></span>{escape(kind)}</li>'
        for kind, colour in zip(named, LAYER_COLOURS, strict=False)
    )
    record = {
        **{name: list(getattr(placed, name)) for name in ("lanes", "kinds", "names", "parameters")},
        **{name: getattr(placed, name).tolist() for name in ("lane", "kind", "stage")},
        "start": np.round(placed.start_s, 12).tolist(),
        "end": np.round(placed.end_s, 12).tolist(),
        "colours": LAYER_COLOURS,
    }
    inside = (
        f'<ul class="legend">{legend}</ul>'
        f'<canvas tabindex="0" role="application" aria-labelledby="placed-layers-title"></canvas>'
        f'<output class="note" data-none="{LAYER_HINT}">{LAYER_HINT}</output>'
        f'<script type="application/json" id="placed-layers-data">{json_for_script(record)}</script>'
    )
    return section_html("placed-layers", escape(title), inside)


# With more stages, half of this number are shown from each end.
MAXIMUM_STAGES = 24
_CELL = 'style="text-align:left;padding:2px 12px 2px 0"'


def plan_html(
    plan: Plan, prediction: Prediction, stages: Sequence[tuple[str, ...]], timeline: Timeline, *, title: str
) -> str:
    """Return a plan as a self-contained piece of HTML.

    Args:
        stages: the rows of its stages, under `STAGE_HEAD`.
        timeline: one step of the plan, predicted.
    """
    parts = [
        f"<p><b>{escape(title)}</b><br/>{escape(_figures(plan, prediction))}</p>",
        _table(stages),
        timeline_svg(timeline, title="One step, predicted"),
    ]
    return f'<div class="weft-plan">{"".join(parts)}</div>'


def _figures(plan: Plan, prediction: Prediction) -> str:
    low, high = format_seconds(prediction.step_low_s), format_seconds(prediction.step_high_s)
    words = [
        f"{batch_text(plan)} in micro-batches of {plan.micro_batch_size}",
        f"{plan.schedule.name}, {shared_out(plan)}, {precision_words(plan)}",
        f"step {format_seconds(prediction.step_s)} ({low} to {high}, {prediction.source})",
    ]
    return "; ".join(words)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    half = MAXIMUM_STAGES // 2
    hidden = len(rows) - MAXIMUM_STAGES
    cells = ("".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = [f"<tr>{row}</tr>" for row in cells]
    if hidden > 0:
        note = f'<tr><td {_CELL} colspan="{len(STAGE_HEAD)}">{counted(hidden, "more stage")}</td></tr>'
        lines = [*lines[:half], note, *lines[-half:]]
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in STAGE_HEAD)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
