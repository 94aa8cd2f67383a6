"""The section of a run's report about its averagings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.describe.synchronisation import local_steps, sync_words
from weft.methods.local_averaging.options import LEFT_OUT, NAME
from weft.planning.decisions import DecidedWords
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ReportSection
from weft.timeline.figures import WAITING


def _rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    steps = local_steps(planned.plan.sync)
    if steps is None:
        return []
    replicas = len(planned.plan.stages[0].replicas)
    averaged = sum((row["step"] + 1) % steps.every == 0 for row in metrics)
    return [
        ("replicas that step by themselves", str(replicas)),
        ("steps between averagings", str(steps.every)),
        ("of them, steps of each replica", " ".join(map(str, steps.steps_of(replicas)))),
        ("averagings in the steps shown", str(averaged)),
        ("weights left out of them, not finite", f"{sum(row.get(LEFT_OUT, 0) for row in metrics):.0f}"),
    ]


def _words(planned: PlannedJob) -> str | None:
    """Return the steps of each replica, where the search has left them open."""
    best = planned.searched.fitting[0].plan
    if local_steps(planned.plan.sync) is None or best is None or best.sync == planned.plan.sync:
        return None
    waiting = planned.step_breakdown[WAITING] / planned.predicted.simulation.step_s
    return f"{sync_words(planned.plan.sync)}; waiting {waiting:.1%}"


REPORT = (
    ReportSection(name=NAME, title="Averaged weights", rows=_rows),
    DecidedWords(method=NAME, words=_words),
)
