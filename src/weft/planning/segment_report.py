"""The words of an answer, and the section of a run's report, about exchanges between segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.describe.units import format_bytes
from weft.moves.cutting import INSIDE, Cutter
from weft.planning.decisions import DecidedWords
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ReportSection
from weft.program.segments import segment_borders


def exchanges_words(cutter: Cutter, title: str) -> DecidedWords:
    """Return the words of a method that cuts passes, for a plan that is asked for exchanges of its own."""

    def words(planned: PlannedJob) -> str | None:
        asked = cutter.asked_way(planned.problem.job)
        if asked == INSIDE:
            return None
        if not cutter.cuts(planned.plan):
            return f"{title.lower()}: {asked} changes nothing, as there is one {cutter.axis} rank"
        return f"{title.lower()}: {asked}"

    return DecidedWords(method=cutter.name, words=words)


def exchanges_section(cutter: Cutter, title: str) -> ReportSection:
    """Return the section of a method that cuts passes, of rank 0's exchanges in a step."""

    def rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        if not cutter.cuts(planned.plan):
            return []
        columns, rank = planned.program.columns, planned.plan.stages[0].replicas[0].ranks[0]
        borders = segment_borders(planned.program)
        here: np.ndarray = borders[columns.rank[borders] == rank]
        steps = planned.program.steps_per_cycle
        return [
            (f"how {title.lower()} run", cutter.way_of(planned.plan)),
            (f"in a step on rank {rank}", str(len(here) // steps)),
            ("payload of these", format_bytes(int(columns.bytes[here].sum()) // steps)),
        ]

    return ReportSection(name=cutter.name, title=title, rows=rows)
