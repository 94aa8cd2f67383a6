"""The report's section about the norms of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ChartLine, ReportSection, Rows, SectionChart

METRIC = "micro_batch_norms"
HIGH = 0.9

Metrics = Sequence[Mapping[str, Any]]


class StepNorms(NamedTuple):
    """A summary of the finite norms of one step's micro-batches."""

    step: int
    median: float
    high: float
    largest: float
    micro_batch: int


def norms_of(metrics: Metrics) -> list[StepNorms]:
    """Return one row for each step with a finite norm."""
    found = []
    for row in metrics:
        norms = np.array([np.nan if one is None else one for one in row.get(METRIC, ())], dtype=np.float64)
        if not np.isfinite(norms).any():
            continue
        middle, high = np.nanquantile(norms, [0.5, HIGH]).tolist()
        largest = int(np.nanargmax(norms))
        found.append(StepNorms(row["step"], middle, high, float(norms[largest]), largest))
    return found


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    steps = norms_of(metrics)
    if not steps:
        return []
    highest = max(steps, key=lambda one: one.largest)
    last = steps[-1]
    return [
        ("steps", f"{len(steps)}, of {planned.plan.micro_batches} micro-batches each"),
        ("median, middle step", f"{np.median([one.median for one in steps]):.4g}"),
        ("90 %, middle step", f"{np.median([one.high for one in steps]):.4g}"),
        (
            "largest of all",
            f"{highest.largest:.4g}, micro-batch {highest.micro_batch} of step {highest.step}",
        ),
        ("last step", f"median {last.median:.4g}, 90 % {last.high:.4g}"),
        ("largest of the last step", f"{last.largest:.4g}, micro-batch {last.micro_batch}"),
    ]


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    steps = norms_of(metrics)
    if not steps:
        return None
    curves = (
        ChartLine("largest", [(one.step, one.largest) for one in steps]),
        ChartLine("90 %", [(one.step, one.high) for one in steps]),
        ChartLine("median", [(one.step, one.median) for one in steps]),
    )
    return SectionChart(curves, "step")


SECTION = ReportSection(
    name="micro-batch-norms", title="Gradient norms of micro-batches", rows=_rows, chart=_chart
)
