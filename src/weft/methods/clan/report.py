"""The report's section about compressed gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.describe.servers import server_words
from weft.describe.synchronisation import options_in
from weft.methods.clan.options import NAME, ClanOptions
from weft.planning.decisions import DecidedWords
from weft.planning.exposed_codecs import codec_rows, exposed_codecs, exposed_words
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ChartLine, ReportSection, Rows, SectionChart
from weft.timeline.timeline import Timeline

# Of a stage: the relative square of what its codec leaves out, and its errors beside its gradient.
CONTRACTION, ERRORS = "contraction", "kept_errors"
Metrics = Sequence[Mapping[str, Any]]


def metric(name: str, stage: int) -> str:
    """Return the name of a stage's number in the metrics of a step."""
    return f"{name}_of_stage_{stage}"


def _points(planned: PlannedJob, metrics: Metrics, name: str) -> Mapping[int, list[tuple[float, float]]]:
    """Return the steps and their numbers, by stage, where there are some."""
    found = {}
    for stage in range(len(planned.plan.stages)):
        key = metric(name, stage)
        points = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
        if points:
            found[stage] = points
    return found


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    options = options_in(planned.plan, NAME, ClanOptions)
    if options is None:
        return []
    rows = [
        ("codec", options.codec),
        ("bits of a gradient", f"{8 * options.block_bytes / options.block:.3g}"),
        *([("gradients are added up by", servers)] if (servers := _servers(planned)) else []),
        *((f"codec of {piece}", codec) for piece, codec in options.codec_of_piece.items()),
    ]
    if found := exposed_codecs(planned):
        rows.append(("exposed codecs, predicted", exposed_words(found)))
    for stage, points in _points(planned, metrics, CONTRACTION).items():
        values = [value for _, value in points]
        rows.append((f"left out of stage {stage}, of the square", f"{np.median(values):.3g}, middle step"))
        rows.append((f"relative error of stage {stage}", f"{np.sqrt(np.median(values)):.3g}, middle step"))
    for stage, points in _points(planned, metrics, ERRORS).items():
        values = [value for _, value in points]
        words = f"{np.median(values):.3g}, middle step; {values[-1]:.3g}, last step"
        rows.append((f"kept errors of stage {stage}, of the gradient's norm", words))
    return rows


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    if options_in(planned.plan, NAME, ClanOptions) is None:
        return None
    curves = [
        ChartLine(f"left out, stage {stage}", points)
        for stage, points in _points(planned, metrics, CONTRACTION).items()
    ]
    return SectionChart(curves, "step") if curves else None


def _measured(planned: PlannedJob, timeline: Timeline) -> Rows:
    if options_in(planned.plan, NAME, ClanOptions) is None:
        return []
    return codec_rows(planned, timeline)


def _servers(planned: PlannedJob) -> str | None:
    servers = planned.plan.servers
    return server_words(servers, planned.problem.job.cluster) if servers else None


def _decided(planned: PlannedJob) -> str | None:
    servers = _servers(planned)
    return servers and f"clan: {servers}"


REPORT = (
    ReportSection(name=NAME, title="Compressed gradients", rows=_rows, chart=_chart, measured=_measured),
    DecidedWords(method=NAME, words=_decided),
)
