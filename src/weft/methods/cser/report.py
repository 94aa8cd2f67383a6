"""The section of a run's report about updates and resets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.describe.synchronisation import options_in
from weft.methods.cser.absences import Absence
from weft.methods.cser.options import ABSENCES, DISAGREEMENT, NAME, RETURNED, STALEST, CserOptions
from weft.methods.cser.program import owed_by, real_ratio
from weft.methods.local_averaging.options import LEFT_OUT
from weft.planning.lost_replicas import DIED
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ReportSection


def _rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    options = options_in(planned.plan, NAME, CserOptions)
    if options is None:
        return []
    owed, ratios = owed_by(options), options.ratios
    rows = [("ratio of a step's update", f"{ratios.update:g}" if ratios.update is not None else "none")]
    if ratios.reset is not None:
        rows += [("ratio of a reset", f"{ratios.reset:g}"), ("steps between resets", str(ratios.every))]
    left_out = sum(row.get(LEFT_OUT, 0) for row in metrics)
    real = real_ratio(options, planned.plan, planned.problem.job.graph)
    rows += [
        ("bytes of all weights over those sent in a mean step", f"{real:.4g}"),
        ("resets in the steps shown", str(sum(owed.resets_after(row["step"]) for row in metrics))),
        ("weights left out of meetings, not finite", f"{left_out:.0f}"),
    ]
    for row in [row for row in metrics if DISAGREEMENT in row][-1:]:
        apart = f"{row[DISAGREEMENT] ** 0.5:.3g}"
        rows.append(("distance of replicas from their mean, at the last reset", apart))
    if stalest := [row[STALEST] for row in metrics if STALEST in row]:
        rows.append(("most steps between two meetings of a block", f"{max(stalest):.0f}"))
    return rows


def _returns(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    found, away = [], dict[int, str]()
    for event in events:
        if event["event"] == DIED:
            words = f"died in step {event['reached']}, and is away since {event['step']} steps were done"
            away |= dict.fromkeys(event["replicas"], words)
        elif event["event"] == ABSENCES:
            back = [Absence(**one) for one in event[RETURNED]]
            found += [(f"replica {one.replica}", str(one)) for one in back]
            for one in back:
                away.pop(one.replica, None)
    return [*found, *((f"replica {replica}", words) for replica, words in away.items())]


REPORT = (ReportSection(name=NAME, title="Updates and resets", rows=_rows, events=_returns),)
