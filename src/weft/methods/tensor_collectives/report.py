"""The section of a run's report about collectives between segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.describe.units import format_bytes
from weft.methods.tensor_collectives.kinds import TENSOR_BACKWARD, TENSOR_FORWARD
from weft.methods.tensor_collectives.program import NAME, way_of
from weft.planning.planned import PlannedJob
from weft.planning.report_sections import ReportSection


def _rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    way = way_of(planned.plan)
    if way == "inside":
        return []
    columns, rank = planned.program.columns, planned.plan.stages[0].replicas[0].ranks[0]
    rows = np.flatnonzero((columns.rank == rank) & np.isin(columns.kind, (TENSOR_FORWARD, TENSOR_BACKWARD)))
    steps = planned.program.steps_per_cycle
    return [
        ("how tensor collectives run", way),
        (f"in a step on rank {rank}", str(len(rows) // steps)),
        ("payload of these", format_bytes(int(columns.bytes[rows].sum()) // steps)),
    ]


REPORT = (ReportSection(name=NAME, title="Tensor collectives", rows=_rows),)
