"""Sections of methods in the report of a run: plain rows, with a chart where they have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.bundles import parts
from weft.planning.planned import PlannedJob

# A label, and the figure or words.
Rows = Sequence[tuple[str, str]]


class ChartLine(NamedTuple):
    """A line of a chart; `points` are (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


class SectionChart(NamedTuple):
    """Lines over one axis with the name `x_name`."""

    curves: Sequence[ChartLine]
    x_name: str


class Section(NamedTuple):
    """A section in its shown form."""

    name: str
    title: str
    rows: Rows
    chart: SectionChart | None = None


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A section of the report; a method contributes it.

    Attributes:
        name: the section's name in the page, one word.
        title: its heading.
        rows: the rows of a job and the metrics of its steps; a section without rows is left out.
        chart: the chart above its rows.
    """

    name: str
    title: str
    rows: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], Rows]
    chart: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], SectionChart | None] = (
        lambda planned, metrics: None
    )


def sections_of(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return every section with something to show."""
    found = (
        Section(one.name, one.title, one.rows(planned, metrics), one.chart(planned, metrics))
        for one in parts(ReportSection)
    )
    return [section for section in found if section.rows]
