"""Contents of a report: its timelines, curves and figures, the chosen steps and the table of kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.errors import InputError, Violation
from weft.planning.report_sections import BySource, Section
from weft.program.kinds import KINDS
from weft.timeline.compare import WARM_UP_STEPS, compare
from weft.timeline.figures import busy_by_kind
from weft.timeline.medians import cycle_of, step_times_s, typical_step_s
from weft.timeline.timeline import Timeline
from weft.web.rows.stage_graph import StageDiagram

Points = Sequence[tuple[float, float]]

LAST_STEPS = 3
MEDIAN = "median"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """The predicted time of one steady step and its 90 % interval, in seconds."""

    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank in bytes; None if unknown.

    `measured_bytes` is the part that `predicted_bytes` predicts. `live` is the predicted curve over one
    step: (seconds since the start of the step, live bytes).
    """

    rank: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    capacity_bytes: int | None = None
    live: Points = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The contents of a report; the page omits empty parts.

    Attributes:
        run, model, cluster: names, shown unchanged.
        plan: the decisions of the plan, as rows (name, decision).
        stage_graph: its stages, if they form a graph.
        predicted: a timeline of one steady step.
        measured: a timeline of all recorded steps.
        interval: the predicted step time.
        step_times: (step, seconds) of every step of the run.
        losses, held_out: (step, nats per token); a value that is not finite is drawn as a gap.
        memory: one entry per rank.
        memory_of: the rank whose memory `memory_rows` shows, part by part, under `MEMORY_HEAD`.
        summary: the contents of `summary.json`, shown as a table.
        by_source: what held-out samples of each source showed.
        sections: the sections of the plan's methods.

    Raises:
        InputError: if the timelines belong to two plans.
    """

    run: str
    model: str = ""
    cluster: str = ""
    plan: Sequence[tuple[str, str]] = ()
    stage_graph: StageDiagram | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    interval: StepInterval | None = None
    step_times: Points = ()
    losses: Points = ()
    held_out: Points = ()
    memory: Sequence[RankMemory] = ()
    memory_of: int = 0
    memory_rows: Sequence[tuple[str, ...]] = ()
    summary: Mapping[str, object] = field(default_factory=dict)
    by_source: BySource = field(default_factory=dict)
    sections: Sequence[Section] = ()

    def __post_init__(self) -> None:
        timelines = (self.predicted, self.measured)
        plans = {timeline.plan_id for timeline in timelines if timeline is not None}
        if len(plans) > 1:
            problem = f"predicted and measured timelines belong to two plans: {' and '.join(sorted(plans))}"
            raise InputError(Violation("report", problem))

    @property
    def measured_step_s(self) -> float | None:
        """Median seconds of a step after the warm-up, or of all steps of a shorter run; None without steps.

        If steps differ in a cycle, the mean of the medians at each place of the cycle.
        """
        times = [(int(step), seconds) for step, seconds in self.step_times if math.isfinite(seconds)]
        cycle = 1 if self.predicted is None else cycle_of(self.predicted)
        counted = times[WARM_UP_STEPS:] if len(times) >= WARM_UP_STEPS + cycle else times
        if not times:
            return None
        return typical_step_s([step for step, _ in counted], [seconds for _, seconds in counted], cycle)


def chosen_steps(measured: Timeline) -> dict[int, list[str]]:
    """Return the measured steps that a page embeds, in order, each with the reasons.

    These are the first step, the median and the slowest step after the warm-up, and the last few.
    """
    steps = np.unique(measured.step)
    if not len(steps):
        return {}
    lengths = step_times_s(measured)
    settled = np.flatnonzero(np.arange(len(steps)) >= min(WARM_UP_STEPS, len(steps) - 1))
    by_length = settled[np.argsort(lengths[settled], kind="stable")]
    reasons: dict[int, list[str]] = {}
    reasons.setdefault(int(steps[by_length[(len(by_length) - 1) // 2]]), []).append(MEDIAN)
    reasons.setdefault(int(steps[0]), []).append("first")
    reasons.setdefault(int(steps[by_length[-1]]), []).append("slowest after warm-up")
    for step in steps[-LAST_STEPS:]:
        reasons.setdefault(int(step), [])
    reasons[int(steps[-1])].append("last")
    return dict(sorted(reasons.items()))


def take_step(timeline: Timeline, step: int) -> Timeline:
    return timeline.take(timeline.step == step)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """One line of the table per kind: count and busy seconds of one step, all ranks together."""

    kind: str
    count: int
    predicted_s: float | None
    measured_s: float | None


def kind_rows(report: ReportData) -> list[KindRow]:
    """Return busy time per kind in one step: predicted, and the measured median after the warm-up."""
    predicted, measured = report.predicted, report.measured
    if predicted is not None and measured is not None and len(predicted) and len(measured):
        return [
            KindRow(
                kind=pair.kind,
                count=pair.instructions,
                predicted_s=pair.predicted_total_s,
                measured_s=pair.measured_total_s,
            )
            for pair in compare(predicted, measured).kinds
        ]
    if predicted is not None and len(predicted):
        return [
            KindRow(kind=kind, count=count, predicted_s=seconds, measured_s=None)
            for kind, count, seconds in _kinds_of(predicted)
        ]
    if measured is not None and len(measured):
        middle = next(step for step, reasons in chosen_steps(measured).items() if MEDIAN in reasons)
        return [
            KindRow(kind=kind, count=count, predicted_s=None, measured_s=seconds)
            for kind, count, seconds in _kinds_of(take_step(measured, middle))
        ]
    return []


def _kinds_of(timeline: Timeline) -> list[tuple[str, int, float]]:
    count = np.bincount(timeline.kind, minlength=len(KINDS)).tolist()
    seconds = busy_by_kind(timeline)
    return [(kind.name, count[code], seconds[kind.name]) for code, kind in enumerate(KINDS) if count[code]]
