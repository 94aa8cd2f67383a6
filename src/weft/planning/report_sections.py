"""Sections that methods add to the report of a run: plain rows, and perhaps a chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.bundles import parts
from weft.planning.planned import PlannedJob

# What, and the figure or words.
Rows = Sequence[tuple[str, str]]


class ChartLine(NamedTuple):
    """A line of a chart; `points` are (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


class SectionChart(NamedTuple):
    """Lines over one axis, which `x_name` names."""

    curves: Sequence[ChartLine]
    x_name: str


class Section(NamedTuple):
    """A section as it is shown."""

    name: str
    title: str
    rows: Rows
    chart: SectionChart | None = None


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A section of the report; a method contributes it.

    Attributes:
        name: of the section in the page, one word.
        title: its heading.
        rows: what it shows of a job and the metrics of its steps; without any the section is left out.
        chart: what it draws of them above its rows.
    """

    name: str
    title: str
    rows: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], Rows]
    chart: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], SectionChart | None] = (
        lambda planned, metrics: None
    )


def sections_of(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return every section that has something to show."""
    found = (
        Section(one.name, one.title, one.rows(planned, metrics), one.chart(planned, metrics))
        for one in parts(ReportSection)
    )
    return [section for section in found if section.rows]
