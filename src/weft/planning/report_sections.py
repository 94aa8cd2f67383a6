"""Sections of methods in the report of a run: plain rows, with a chart where they have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.bundles import others, parts, parts_of
from weft.describe.units import shown
from weft.installed import failure
from weft.planning.planned_job import PlannedJob
from weft.timeline.timeline import Timeline

# A label, and the figure or words.
Rows = Sequence[tuple[str, str]]
# By source of the data, what its held-out samples showed: `loss`, and what methods saw.
BySource = Mapping[str, Mapping[str, Any]]
# The name of these records in a run's summary, and in its evaluation.
BY_SOURCE = "by_source"
# The name, in the metrics of a step, of the numbers of its samples' sources, in the order of the batch.
SAMPLE_SOURCES = "sample_sources"


class ChartLine(NamedTuple):
    """A line of a chart; `points` are (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


class SectionChart(NamedTuple):
    """Lines over one axis with the name `x_name`."""

    curves: Sequence[ChartLine]
    x_name: str


class Table(NamedTuple):
    """A table in a file of its own, for spreadsheets."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]


class Section(NamedTuple):
    """A section in its shown form."""

    name: str
    title: str
    rows: Rows
    chart: SectionChart | None = None
    table: Table | None = None


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A section of the report; a method contributes it.

    Attributes:
        name: the section's name in the page, one word.
        title: its heading.
        rows: the rows of a job and the metrics of its steps; a section without rows is left out.
        chart: the chart above its rows.
        by_source: further rows, of a job whose data has several sources.
        events: further rows, of the events of the run.
        measured: further rows, of the measured steps.
        table: the table beside the report, `NAME.csv`.
    """

    name: str
    title: str
    rows: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], Rows]
    chart: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], SectionChart | None] = (
        lambda planned, metrics: None
    )
    by_source: Callable[[PlannedJob, BySource], Rows] = lambda planned, sources: ()
    events: Callable[[Sequence[Mapping[str, Any]]], Rows] = lambda events: ()
    measured: Callable[[PlannedJob, Timeline], Rows] = lambda planned, timeline: ()
    table: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], Table | None] = lambda planned, metrics: None


def sections_of(
    planned: PlannedJob,
    metrics: Sequence[Mapping[str, Any]],
    sources: BySource = MappingProxyType({}),
    events: Sequence[Mapping[str, Any]] = (),
    measured: Timeline | None = None,
) -> list[Section]:
    """Return every section with something to show.

    A section of another package that fails says so in its place: a run that has ended keeps its report.
    """
    of_others = parts_of(ReportSection, others())
    found = []
    for one in parts(ReportSection):
        try:
            section = _section(one, planned, metrics, sources, events, measured)
        except Exception as error:
            if one not in of_others:
                raise
            section = Section(one.name, one.title, [("not shown", failure(error))])
        found.append(section)
    return [section for section in found if section.rows]


def _section(
    one: ReportSection,
    planned: PlannedJob,
    metrics: Sequence[Mapping[str, Any]],
    sources: BySource,
    events: Sequence[Mapping[str, Any]],
    measured: Timeline | None,
) -> Section:
    rows = [
        *one.rows(planned, metrics),
        *one.by_source(planned, sources),
        *one.events(events),
        *(() if measured is None else one.measured(planned, measured)),
    ]
    for row in rows:
        if not isinstance(row, tuple) or len(row) != 2 or not all(isinstance(part, str) for part in row):
            raise TypeError(f"{shown(row)} is no row: a label and the figure, as text")
    return Section(one.name, one.title, rows, one.chart(planned, metrics), one.table(planned, metrics))
