"""The section of a run's report about exchanges between segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.describe.units import format_bytes
from weft.moves.cutting import Cutter
from weft.planning.planned import PlannedJob
from weft.planning.report_sections import ReportSection
from weft.program.segments import segment_borders


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
