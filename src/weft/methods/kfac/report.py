"""The report's section about K-FAC: the age of the curvature that steps use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.methods.kfac.ages import steady_age
from weft.methods.kfac.options import NAME, options_of
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ChartLine, ReportSection, Rows, SectionChart

# Steps since those whose curvature a step uses, the mean over blocks; of a block without any, all steps.
AGE = "curvature_age_steps"

Metrics = Sequence[Mapping[str, Any]]


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    options, ages = options_of(planned.plan), [row[AGE] for row in metrics if AGE in row]
    if options is None:
        return []
    rows = [("damping", f"{options.damping:g}")]
    if (settled := steady_age(planned.program)) is not None:
        rows += [("age of the curvature, predicted after the first windows", f"{settled:.1f} steps")]
    if ages:
        rows += [("age of the curvature, mean step", f"{sum(ages) / len(ages):.1f} steps")]
        rows += [("oldest", f"{max(ages):.1f} steps"), ("last step", f"{ages[-1]:.1f} steps")]
    return rows


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    ages = [(row["step"], row[AGE]) for row in metrics if AGE in row]
    return SectionChart((ChartLine("age", ages),), "step") if ages else None


REPORT = (ReportSection(name=NAME, title="Curvature", rows=_rows, chart=_chart),)
