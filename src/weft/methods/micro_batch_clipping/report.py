"""The report's section about clipped micro-batches: the bound, and the norms before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.methods.micro_batch_clipping.options import options_of
from weft.planning.planned import PlannedJob
from weft.planning.report_sections import ChartLine, ReportSection, Rows, SectionChart
from weft.program.arrays import Floats

# The norm of each clipped micro-batch's mean gradient before clipping. The bound of a step, the share of its
# micro-batches above the bound, and of those that are left out because their norm is not finite.
NORMS = "clip_norms"
BOUND, CLIPPED, DROPPED = "clip_bound", "clipped", "dropped"

Metrics = Sequence[Mapping[str, Any]]


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    table, told = options_of(planned.plan), [row for row in metrics if NORMS in row]
    if table is None or not told:
        return []
    norms = np.array(
        [[np.nan if one is None else one for one in row[NORMS]] for row in told], dtype=np.float64
    )
    bounds = np.array([row[BOUND] for row in told], dtype=np.float64)
    kept = np.minimum(1.0, bounds[:, None] / np.maximum(norms, np.finfo(np.float64).tiny))
    dropped = sum(row[DROPPED] for row in told) / len(told)
    return [
        ("clipped micro-batches", f"{table.samples} samples, to {table.micro}"),
        ("bound, first and last step", f"{bounds[0]:.4g}, {bounds[-1]:.4g}"),
        ("median norm, last step", f"{np.nanmedian(norms[-1]):.4g}"),
        ("above the bound", f"{sum(row[CLIPPED] for row in told) / len(told):.1%}"),
        ("length that clipping leaves, mean", f"{np.nanmean(kept):.1%}"),
        ("left out, not finite", f"{dropped:.1%}"),
    ]


def _norms_of(row: Mapping[str, Any]) -> Floats:
    return np.array([np.nan if one is None else one for one in row[NORMS]], dtype=np.float64)


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    told = [row for row in metrics if NORMS in row]
    if not told:
        return None
    norms = [
        np.array([np.nan if one is None else one for one in row[NORMS]], dtype=np.float64) for row in told
    ]
    curves = (
        ChartLine("bound", [(row["step"], row[BOUND]) for row in told]),
        ChartLine(
            "median norm",
            [(row["step"], float(np.nanmedian(own))) for row, own in zip(told, norms, strict=True)],
        ),
    )
    return SectionChart(curves, "step")


SECTION = ReportSection(name="micro-batch-clipping", title="Clipped micro-batches", rows=_rows, chart=_chart)
