"""Figures of work in the bubbles of a plan: busy shares, windows, seconds added to a step, measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.units import format_seconds
from weft.methods.bubble_filling.anew import PLACED_ANEW
from weft.methods.bubble_filling.drift import compared, read_factors
from weft.methods.bubble_filling.kinds import owed_by, work_kinds
from weft.methods.bubble_filling.options import NAME, OPEN, BubbleOptions, options_of
from weft.methods.bubble_filling.step_works import step_works_of
from weft.methods.bubble_filling.works import items_of, with_options
from weft.planning.compile import compile_plan
from weft.planning.decisions import DecidedWords
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import ReportSection, Rows
from weft.predict.predict import predict
from weft.program.kinds import KINDS, is_any_of, is_compute, kind_words
from weft.timeline.compare import WARM_UP_STEPS
from weft.timeline.medians import from_step, step_times_s
from weft.timeline.timeline import Timeline


def _kinds(planned: PlannedJob) -> list[int]:
    return work_kinds(planned.plan, planned.problem.job.graph)


def _busy(timeline: Timeline, kinds: Sequence[int]) -> tuple[float, float]:
    """Return the nanoseconds in which all ranks compute, and those of them without work of these kinds."""
    taken = np.where(is_compute(timeline.kind), timeline.end_ns - timeline.start_ns, 0)
    return float(taken.sum()), float(taken[~is_any_of(timeline.kind, kinds)].sum())


@dataclass(frozen=True)
class Filled:
    """The bubbles of a predicted step.

    Attributes:
        busy, busy_before: the mean busy share of devices, with the work and without.
        steps: by stage with work, of its window.
        in_steps: by the name of a work of every step, its pieces of a stage there.
        added_s: seconds by which the work makes a mean step longer.
    """

    busy: float
    busy_before: float
    steps: Mapping[int, int]
    in_steps: Mapping[str, int]
    added_s: float

    @classmethod
    def of(cls, planned: PlannedJob) -> Filled | None:
        """Return the bubbles of a plan that fills some, else None."""
        asked, plan = options_of(planned.plan), planned.plan
        if asked is None:
            return None
        owed = owed_by(planned.program)
        graph, cost_model = planned.problem.job.graph, planned.problem.cost_model
        windows = () if owed is None else owed.steps
        in_steps = {one.method: one.rows(plan, graph, asked) for one in step_works_of(plan)}
        bare = with_options(plan, windows=OPEN, steps=OPEN)
        bare_s = predict(cost_model, bare, compile_plan(bare, graph)).simulation.step_s
        simulation = planned.predicted.simulation
        cycle_ns = simulation.step_s * planned.program.steps_per_cycle * 1e9 * plan.ranks
        busy, busy_before = _busy(simulation.timeline, _kinds(planned))
        return cls(
            busy=busy / cycle_ns,
            busy_before=busy_before / cycle_ns,
            steps={stage: steps for stage, steps in enumerate(windows) if items_of(plan, graph, stage)},
            in_steps={name: sum(one.pieces for one in rows) for name, rows in in_steps.items()},
            added_s=max(0.0, simulation.step_s - bare_s),
        )

    @property
    def every(self) -> str:
        """The windows of stages, in words."""
        least, most = min(self.steps.values(), default=1), max(self.steps.values(), default=1)
        if most == 1:
            return "in every step"
        return f"every {least} steps" if least == most else f"every {least} to {most} steps"


def _words(planned: PlannedJob) -> str | None:
    filled, options = Filled.of(planned), options_of(planned.plan)
    if filled is None or options is None:
        return None
    added = "nothing" if filled.added_s < 1e-9 else f"{format_seconds(filled.added_s)} a step"
    busy = f"devices busy {filled.busy_before:.1%} -> {filled.busy:.1%}"
    windowed = ", ".join(name for name in options.works if name not in filled.in_steps)
    work = [f"{windowed} {filled.every}"] if windowed else []
    work += [f"{', '.join(filled.in_steps)} in every step"] if filled.in_steps else []
    return f"bubbles: {', '.join(work)}; {busy}; it adds {added}"


def _rows(planned: PlannedJob, metrics: Sequence[Mapping[str, Any]]) -> Rows:
    filled, options = Filled.of(planned), options_of(planned.plan)
    if filled is None or options is None:
        return []
    found = [
        ("work", options.work.replace(",", ", ")),
        ("placer", f"{options.placer}, with a margin of {options.margin:.0%}"),
        ("devices busy, predicted without the work", f"{filled.busy_before:.1%}"),
        ("devices busy, predicted with it", f"{filled.busy:.1%}"),
    ]
    found += [
        (f"{name}, pieces of a stage in each step", str(count)) for name, count in filled.in_steps.items()
    ]
    if filled.steps:
        found += [("all other work is done" if filled.in_steps else "all of it is done", filled.every)]
        by_stage = ", ".join(f"{stage}: {steps}" for stage, steps in filled.steps.items())
        found += [("steps of a window, by stage", by_stage)]
    if factors := _placed_for(options):
        named = ", ".join(f"{kind_words(kind)} {factor:.2f}" for kind, factor in factors.items())
        found += [("placed for measured times, over predicted ones", named)]
    return [*found, ("it adds to a predicted step", format_seconds(filled.added_s))]


def _placed_for(options: BubbleOptions) -> dict[str, float]:
    """Return, by kind, the largest factor of predicted times for which work was placed anew."""
    found: dict[str, float] = {}
    for place, factor in sorted(read_factors(options.measured).items()):
        found[place.kind] = max(found.get(place.kind, 0.0), factor)
    return found


def _events(events: Sequence[Mapping[str, Any]]) -> Rows:
    return [
        (f"placed anew after {event['step']} steps", f"{event['drift']}; {event['change']}")
        for event in events
        if event["event"] == PLACED_ANEW
    ]


def _measured(planned: PlannedJob, timeline: Timeline) -> Rows:
    """Return busy shares of the measured steps after the warm-up, and work that leaves the margin."""
    options, steps = options_of(planned.plan), np.unique(timeline.step)
    if options is None or not len(steps):
        return []
    settled = from_step(timeline, int(steps[min(WARM_UP_STEPS, len(steps) - 1)]))
    kinds, span_ns = _kinds(planned), float(step_times_s(settled).sum()) * 1e9 * planned.plan.ranks
    busy, busy_before = _busy(settled, kinds)
    return [
        ("devices busy, measured without the work", f"{busy_before / span_ns:.1%}"),
        ("devices busy, measured with it", f"{busy / span_ns:.1%}"),
        *_drift(planned.predicted.simulation.timeline, settled, kinds, options),
    ]


def _drift(predicted: Timeline, measured: Timeline, kinds: Sequence[int], options: BubbleOptions) -> Rows:
    """Return, by kind of work, measured over predicted seconds, and whether they leave the margin."""
    places, placed_for = compared(predicted, measured, kinds), _placed_for(options)
    found = []
    for kind in (KINDS[code] for code in kinds):
        pairs = [seconds for place, seconds in places.items() if place.kind == kind.name]
        if not pairs:
            continue
        expected_s, taken_s = map(sum, zip(*pairs, strict=True))
        ratio = taken_s / expected_s
        most = (1 + options.margin) * placed_for.get(kind.name, 1.0)
        beyond = "; `weft corrections` learns it for the next plan" if ratio > most else ""
        found.append((f"{kind.words}, measured", f"{ratio:.2f} times the predicted time{beyond}"))
    return found


REPORT = (
    ReportSection(name=NAME, title="Work in bubbles", rows=_rows, measured=_measured, events=_events),
    DecidedWords(method=NAME, words=_words),
)
