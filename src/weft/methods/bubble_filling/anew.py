"""Work placed anew while a run trains, when measured times leave the margin for which it was placed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.describe.plan import Plan
from weft.describe.units import counted, format_seconds
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.decide import decide
from weft.methods.bubble_filling.drift import (
    InstructionPlace,
    drifted,
    factors_text,
    measured_factors,
    predicted_with,
    read_factors,
)
from weft.methods.bubble_filling.kinds import work_kinds
from weft.methods.bubble_filling.options import OPEN, TABLE_NAME, options_of, read_windows
from weft.methods.bubble_filling.works import with_options
from weft.planning.job_rules import JobRule
from weft.planning.long_steps import predict_long
from weft.planning.measured_changes import Decision, MeasuredChange
from weft.planning.planned_job import PlannedJob
from weft.timeline.timeline import Timeline

KEY = f"{TABLE_NAME}.place_anew_every"
PLACED_ANEW, STAYS, UNMEASURED = "work placed anew", "work stays", "work not measured"
# A smaller share of the step is not worth a change.
LEAST_GAIN = 1e-3
# A median needs more than one.
CYCLES = 2
_SHOWN = 2


def place_anew(job: PlannedJob, measured: Timeline) -> Decision | None:
    """Return the plan with work placed for the measured times, if these leave the margin; None: they do not.

    It takes over if it shortens the predicted step, or the windows without a longer step. All steps are
    predicted with the measured times.
    """
    plan, graph, asked = job.plan, job.problem.job.graph, options_of(job.plan)
    assert asked is not None, "its plan fills bubbles"
    before = read_factors(asked.measured)
    kinds = work_kinds(plan, graph)
    now = measured_factors(job.predicted.simulation.timeline, measured, kinds, asked.margin, before)
    drift = drifted(now, before, asked.margin)
    if not drift:
        return None
    words: dict[str, Any] = {"drift": _words(drift)}
    predicted = predicted_with(now, job.problem.cost_model, graph)
    (_, former) = predicted(plan)
    try:
        anew = decide(
            with_options(plan, windows=OPEN, steps=OPEN, measured=factors_text(now)), graph, predicted
        )
    except InputError as error:
        return Decision(event=STAYS, words=words | {"reason": str(error.violations[0])})
    (_, found) = predicted(anew)
    words |= {"former_step_s": former.step_s, "step_s": found.step_s}
    shorter = found.step_s < (1.0 - LEAST_GAIN) * former.step_s
    sooner = found.step_s <= former.step_s and sum(_windows(anew)) < sum(_windows(plan))
    if not (shorter or sooner):
        return Decision(event=STAYS, words=words | {"reason": "no others make steps or windows shorter"})
    if not _fits(job, anew):
        return Decision(event=STAYS, words=words | {"reason": "others do not fit into memory"})
    steps = f"predicted step {format_seconds(former.step_s)} -> {format_seconds(found.step_s)}"
    words |= {
        "former": plan.plan_id,
        "now": anew.plan_id,
        "windows": _windows(anew),
        "change": f"{steps}, {_windows_words(plan)} -> {_windows_words(anew)}",
    }
    return Decision(event=PLACED_ANEW, words=words, plan=anew)


def _fits(job: PlannedJob, plan: Plan) -> bool:
    needs = predict_long(job.problem.cost_model, plan).prediction.needs_at(job.problem.memory_risk)
    return all(need <= room for need, room in zip(needs, job.unreserved_bytes, strict=True))


def _words(drift: Sequence[tuple[InstructionPlace, float]]) -> str:
    """Return the largest drifts."""
    shown = [f"{place} takes {factor:.2f} times its seconds" for place, factor in drift[:_SHOWN]]
    more = [f"{len(drift) - _SHOWN} more"] if len(drift) > _SHOWN else []
    return ", ".join([*shown, *more])


def _windows(plan: Plan) -> list[int]:
    """Return the steps of the windows, by stage."""
    asked = options_of(plan)
    assert asked is not None, "its plan fills bubbles"
    return [one.steps for one in read_windows(asked.windows)]


def _windows_words(plan: Plan) -> str:
    least, most = min(_windows(plan)), max(_windows(plan))
    return f"windows of {counted(most, 'step')}" if least == most else f"windows of {least} to {most} steps"


def _every(plan: Plan) -> int:
    asked = options_of(plan)
    return 0 if asked is None else asked.place_anew_every


def _never_due(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation if a run ends before its first decision."""
    every, steps, cycle = _every(planned.plan), planned.last_step, planned.program.steps_per_cycle
    if not every:
        return
    first = max(every, CHANGE.first_step(0, cycle) + CYCLES * cycle)
    first = -(-first // cycle) * cycle
    if first >= steps:
        problem = f"{every}; the first decision comes after {first} steps, of {steps}"
        yield Violation(KEY, problem, "0")


CHANGE = MeasuredChange(key=KEY, every=_every, decide=place_anew, unmeasured=UNMEASURED, cycles=CYCLES)
ANEW = (CHANGE, JobRule(refuse=_never_due))
