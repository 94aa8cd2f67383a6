"""Sections of other packages in a report: one that fails is told in its place, and the others stay."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from installing import install_method

from weft.planning import report_sections
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ReportSection, sections_of

# What no section here reads.
PLANNED = cast("PlannedJob", None)


def install(packages: Path, rows: str) -> None:
    pure = (
        "from weft.bundles import Bundle\n"
        "from weft.planning.report_sections import ReportSection\n"
        "def section(name, rows):\n"
        "    return ReportSection(name=name, title=name, rows=rows)\n"
        "def rows(planned, metrics):\n"
        f"    return {rows}\n"
        "BUNDLE = Bundle(name='other', parts=(\n"
        "    section('first', rows), section('second', lambda *_: [('a', '1')])))\n"
    )
    install_method(packages, "weft_other", "other", pure, "")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("metrics[0]", "IndexError: tuple index out of range (__init__.py, line 6)"),
        ("[('a', 1.0)]", "TypeError: ('a', 1.0) is no row: a label and the figure, as text"),
        ("'ab'", "TypeError: 'a' is no row: a label and the figure, as text"),
        ("[('a', 'b', 'c')]", "TypeError: ('a', 'b', 'c') is no row: a label and the figure, as text"),
    ],
)
def test_a_section_that_fails_leaves_the_others(
    packages: Path, monkeypatch: pytest.MonkeyPatch, rows: str, told: str
) -> None:
    install(packages, rows)
    only = report_sections.parts_of(ReportSection, report_sections.others())
    monkeypatch.setattr(report_sections, "parts", lambda kind: only)
    found = sections_of(PLANNED, ())
    assert [(one.name, list(one.rows)) for one in found] == [
        ("first", [("not shown", told)]),
        ("second", [("a", "1")]),
    ]


def test_a_section_of_weft_that_fails_is_a_mistake_of_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ReportSection(name="own", title="own", rows=lambda planned, metrics: [str(metrics[0])])  # type: ignore[list-item]
    monkeypatch.setattr(report_sections, "parts", lambda kind: (own,))
    with pytest.raises(IndexError):
        sections_of(PLANNED, ())
