"""The report's section about the loss of an auxiliary head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.methods.auxiliary_head.options import options_of
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ChartLine, ReportSection, Rows, SectionChart

METRIC = "auxiliary_loss"

Metrics = Sequence[Mapping[str, Any]]


def _losses(metrics: Metrics, name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in metrics if row.get(METRIC) is not None]


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    options, losses = options_of(planned.plan), _losses(metrics, METRIC)
    if options is None or not losses:
        return []
    first, last = losses[0], losses[-1]
    return [
        ("behind block", f"{options.after_block}, with weight {options.weight:g}"),
        ("its loss, first step shown", f"{first[1]:.4f}, step {first[0]}"),
        ("its loss, last step", f"{last[1]:.4f}, step {last[0]}"),
        ("above the model's own, last step", f"{last[1] - _losses(metrics, 'loss')[-1][1]:.4f}"),
    ]


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    if not _losses(metrics, METRIC):
        return None
    curves = (
        ChartLine("auxiliary head", _losses(metrics, METRIC)),
        ChartLine("model", _losses(metrics, "loss")),
    )
    return SectionChart(curves, "step")


SECTION = ReportSection(name="auxiliary-head", title="Loss of the auxiliary head", rows=_rows, chart=_chart)
