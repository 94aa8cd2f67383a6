"""What methods add to the report of a run: sections of plain rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.bundles import parts
from weft.planning.planned import PlannedJob

# What, and the figure or words.
Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A section of the report; a method contributes it.

    Attributes:
        name: of the section in the page, one word.
        title: its heading.
        rows: what it shows of a job and the metrics of its steps; without any the section is left out.
    """

    name: str
    title: str
    rows: Callable[[PlannedJob, Sequence[Mapping[str, Any]]], Rows]


def sections_of(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Rows]]:
    """(name, title, rows) of every section that has something to show."""
    found = [(one.name, one.title, one.rows(planned, metrics)) for one in parts(ReportSection)]
    return [section for section in found if section[2]]
