"""A plan in a notebook: its figures, its stages with their memory, and one predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from weft.describe.cluster import Cluster
from weft.describe.plan import Plan, precision_words, shared_out
from weft.describe.prediction import Prediction
from weft.describe.units import format_seconds
from weft.timeline.timeline import Timeline
from weft.web.charts.timeline import timeline_svg
from weft.web.rows.plan import STAGE_HEAD, stage_rows

# With more stages, half of this number are shown from each end.
MAXIMUM_STAGES = 24
_CELL = 'style="text-align:left;padding:2px 12px 2px 0"'


def plan_html(plan: Plan, prediction: Prediction, cluster: Cluster, timeline: Timeline, *, title: str) -> str:
    """Return a plan as a self-contained piece of HTML.

    Args:
        timeline: one step of the plan, predicted.
    """
    parts = [
        f"<p><b>{escape(title)}</b><br/>{escape(_figures(plan, prediction))}</p>",
        _table(stage_rows(plan, prediction, cluster)),
        timeline_svg(timeline, title="One step, predicted"),
    ]
    return f'<div class="weft-plan">{"".join(parts)}</div>'


def _figures(plan: Plan, prediction: Prediction) -> str:
    low, high = format_seconds(prediction.step_low_s), format_seconds(prediction.step_high_s)
    words = [
        f"{plan.global_batch} samples of {plan.sequence} tokens in micro-batches of {plan.micro_batch_size}",
        f"{plan.schedule.name}, {shared_out(plan)}, {precision_words(plan)}",
        f"step {format_seconds(prediction.step_s)} ({low} to {high}, {prediction.source})",
    ]
    return "; ".join(words)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    half = MAXIMUM_STAGES // 2
    hidden = len(rows) - MAXIMUM_STAGES
    lines = [_line(row) for row in rows]
    if hidden > 0:
        note = f'<tr><td {_CELL} colspan="{len(STAGE_HEAD)}">{hidden} more stages</td></tr>'
        lines = [*lines[:half], note, *lines[-half:]]
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in STAGE_HEAD)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _line(row: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td {_CELL}>{escape(cell)}</td>' for cell in row)}</tr>"
