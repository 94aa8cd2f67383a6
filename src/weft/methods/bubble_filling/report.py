"""Figures of work in the bubbles of a plan: busy shares, windows, and seconds added to a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.units import format_seconds
from weft.methods.bubble_filling.kinds import FillsBubbles
from weft.methods.bubble_filling.options import NAME, OPEN, options_of
from weft.methods.bubble_filling.works import items_of, with_options
from weft.planning.compile import compile_plan
from weft.planning.decisions import DecidedWords
from weft.planning.planned import PlannedJob
from weft.planning.report_sections import ReportSection, Rows
from weft.predict.predict import predict
from weft.program.kinds import is_any_of, is_compute


@dataclass(frozen=True)
class Filled:
    """The bubbles of a predicted step.

    Attributes:
        busy, busy_before: the mean busy share of devices, with the work and without.
        steps: of the window of each stage with work.
        added_s: seconds by which the work makes a mean step longer.
    """

    busy: float
    busy_before: float
    steps: tuple[int, ...]
    added_s: float

    @classmethod
    def of(cls, planned: PlannedJob) -> Filled | None:
        """Return the bubbles of a plan that fills some, else None."""
        owed = planned.program.obligations.methods.get(NAME)
        if options_of(planned.plan) is None or not isinstance(owed, FillsBubbles):
            return None
        graph, cost_model = planned.problem.job.graph, planned.problem.cost_model
        stages = range(len(planned.plan.stages))
        items = [items_of(planned.plan, graph, stage) for stage in stages]
        bare = with_options(planned.plan, windows=OPEN)
        bare_s = predict(cost_model, bare, compile_plan(bare, graph)).simulation.step_s
        simulation, ranks = planned.predicted.simulation, planned.plan.ranks
        rows = simulation.timeline
        taken = np.where(is_compute(rows.kind), rows.end_ns - rows.start_ns, 0)
        work = is_any_of(rows.kind, sorted({item.kind for some in items for item in some}))
        cycle_ns = simulation.step_s * planned.program.steps_per_cycle * 1e9
        return cls(
            busy=float(taken.sum()) / (cycle_ns * ranks),
            busy_before=float(taken[~work].sum()) / (cycle_ns * ranks),
            steps=tuple(owed.steps[stage] for stage in stages if items[stage]),
            added_s=max(0.0, simulation.step_s - bare_s),
        )

    @property
    def every(self) -> str:
        """The windows of stages, in words."""
        least, most = min(self.steps), max(self.steps)
        if most == 1:
            return "in every step"
        return f"every {least} steps" if least == most else f"every {least} to {most} steps"


def _words(planned: PlannedJob) -> str | None:
    filled, options = Filled.of(planned), options_of(planned.plan)
    if filled is None or options is None:
        return None
    added = "nothing" if filled.added_s < 1e-9 else f"{format_seconds(filled.added_s)} a step"
    busy = f"devices busy {filled.busy_before:.1%} -> {filled.busy:.1%}"
    return f"bubbles: {options.work.replace(',', ', ')} {filled.every}; {busy}; it adds {added}"


def _rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> Rows:
    filled, options = Filled.of(planned), options_of(planned.plan)
    if filled is None or options is None:
        return []
    return [
        ("work", options.work.replace(",", ", ")),
        ("placer", f"{options.placer}, with a margin of {options.margin:.0%}"),
        ("devices busy, predicted without the work", f"{filled.busy_before:.1%}"),
        ("devices busy, predicted with it", f"{filled.busy:.1%}"),
        ("all of it is done", filled.every),
        ("it adds to a predicted step", format_seconds(filled.added_s)),
    ]


REPORT = (
    ReportSection(name=NAME, title="Work in bubbles", rows=_rows),
    DecidedWords(method=NAME, words=_words),
)
