"""The section of a run's report about its averagings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.methods.local_averaging.options import NAME, options_of
from weft.planning.planned import PlannedJob
from weft.planning.report_sections import ReportSection


def _rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    options = options_of(planned.plan)
    if options is None:
        return []
    replicas = len(planned.plan.stages[0].replicas)
    averaged = sum((row["step"] + 1) % options.every == 0 for row in metrics)
    return [
        ("replicas that step by themselves", str(replicas)),
        ("steps between averagings", str(options.every)),
        ("averagings in the steps shown", str(averaged)),
    ]


REPORT = (ReportSection(name=NAME, title="Averaged weights", rows=_rows),)
