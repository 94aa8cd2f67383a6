"""Codecs that delay the step: the piece of a gradient in which they do, and a better codec for it.

A codec is exposed while it is on the critical path of the timeline. Only the codec of one piece changes, and
only to one that sends no fewer bits. It is the most exposed piece that has a better codec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft.describe.plan import Plan
from weft.describe.prediction import Prediction
from weft.describe.synchronisation import DENSE, other_codecs
from weft.describe.toml_table import table_text
from weft.describe.units import format_seconds
from weft.errors import InputError
from weft.planning.long_steps import predict_long
from weft.planning.measured_changes import Decision
from weft.planning.planned import plan_problems
from weft.planning.planned_job import PlannedJob
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.traffic import codec_shares
from weft.timeline.critical_path import critical_path
from weft.timeline.figures import error_text, prediction_error
from weft.timeline.timeline import Timeline

# A smaller share of the step is not worth a change.
LEAST_GAIN = 1e-3
# The most exposed pieces for which other codecs are tried.
MOST_TRIED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedCodec:
    """A piece of a stage's gradient, and the seconds of a mean step in which its codecs are exposed."""

    stage: int
    piece: int
    seconds: float

    def __str__(self) -> str:
        return f"stage {self.stage}, piece {self.piece}: {format_seconds(self.seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChange:
    """A plan with another codec for one piece, its prediction, and the predicted step without the change."""

    exposed: ExposedCodec
    plan: Plan
    keys: Mapping[str, int | float | str | bool]
    prediction: Prediction
    former_step_s: float

    def __str__(self) -> str:
        keys = table_text("", self.keys).strip().replace("\n", ", ")
        step_s = self.prediction.step_s
        change = error_text(prediction_error(step_s, self.former_step_s))
        return f"[sync] {keys}: predicted step {format_seconds(step_s)} ({change})"


def exposed_codecs(job: PlannedJob, measured: Timeline | None = None) -> tuple[ExposedCodec, ...]:
    """Return the pieces with exposed codecs, the longest first: in measured steps, else in the predicted."""
    if job.plan.sync.name == DENSE:
        return ()
    program, predicted = job.program, job.predicted
    costs, simulation = predicted.priced.costs, predicted.simulation
    tick_ns = costs.tick_s / 1e-9
    placed = PlacedPlan(program=program, plan=job.plan, model=job.problem.cost_model.of(job.plan))
    occupancy_s = np.asarray(costs.occupancy * costs.tick_s, dtype=np.float64)
    shares = codec_shares(Pricing(program=program, placed=placed), occupancy_s)
    if not shares.any():
        return ()
    if measured is None:
        period_ns = simulation.step_s * program.steps_per_cycle * 1e9
        delay_ns = np.rint(costs.latency * tick_ns).astype(np.int64)
        path_s = critical_path(program, simulation.timeline, period_ns=period_ns, delay_ns=delay_ns)
    else:
        path_s = critical_path(program, measured)
    exposed_s = path_s * shares
    rows = np.flatnonzero(exposed_s)
    places = np.stack([program.columns.stage[rows], program.columns.part[rows]], axis=1)
    pieces, which = np.unique(places, axis=0, return_inverse=True)
    seconds = np.bincount(which.reshape(-1), weights=exposed_s[rows], minlength=len(pieces))
    order = np.argsort(-seconds, kind="stable")
    found = zip(pieces[order].tolist(), seconds[order].tolist(), strict=True)
    return tuple(ExposedCodec(stage=stage, piece=piece, seconds=one) for (stage, piece), one in found)


def codec_change(job: PlannedJob, exposed: Sequence[ExposedCodec]) -> CodecChange | None:
    """Return the best other codec for the most exposed piece that has a better one.

    A codec is better if it shortens the predicted step. None: no piece has one, of the most exposed ones.
    """
    if not exposed:
        return None
    former_s = predict_long(job.problem.cost_model, job.plan).prediction.step_s
    changes = (_change_of(job, one, former_s) for one in exposed[:MOST_TRIED])
    return next((one for one in changes if one is not None), None)


def _change_of(job: PlannedJob, exposed: ExposedCodec, former_s: float) -> CodecChange | None:
    best: CodecChange | None = None
    for sync in other_codecs(job.plan.sync, exposed.stage, exposed.piece):
        plan = job.plan.model_copy(update={"sync": sync})
        try:
            refused = plan_problems(plan, job.problem.job)
            prediction = predict_long(job.problem.cost_model, plan).prediction
        except InputError:
            continue
        needs = prediction.needs_at(job.problem.memory_risk)
        fits = all(need <= room for need, room in zip(needs, job.unreserved_bytes, strict=True))
        least_s = (1.0 - LEAST_GAIN) * former_s if best is None else best.prediction.step_s
        if not refused and fits and prediction.step_s < least_s:
            keys = {key: one for key, one in sync.options.items() if job.plan.sync.options.get(key) != one}
            best = CodecChange(
                exposed=exposed, plan=plan, keys=keys, prediction=prediction, former_step_s=former_s
            )
    return best


def codec_decision(job: PlannedJob, measured: Timeline) -> Decision | None:
    """Return the change of the most exposed codec, or that none is better; None: no codec is exposed."""
    found = exposed_codecs(job, measured)
    if not found:
        return None
    change = codec_change(job, found)
    one = found[0] if change is None else change.exposed
    words: dict[str, Any] = {"exposed": str(one), **asdict(one)}
    if change is None:
        return Decision(event="codec exposed", words=words)
    words |= {"former": job.plan.plan_id, "now": change.plan.plan_id, "change": str(change)}
    return Decision(event="codec changed", words=words, plan=change.plan)


def exposed_words(found: Sequence[ExposedCodec]) -> str:
    """Return how long exposed codecs delay a step, and the piece in which they do most."""
    whole_s = sum(one.seconds for one in found)
    return f"{format_seconds(whole_s)} of a step, most in {found[0]}"


def codec_rows(job: PlannedJob, measured: Timeline | None = None) -> list[tuple[str, str]]:
    """Return, by label, the delay by exposed codecs, and the change that shortens the step most."""
    found = exposed_codecs(job, measured)
    if not found:
        return []
    change = codec_change(job, found)
    clock = "predicted" if measured is None else "measured"
    rows = [(f"exposed codecs, {clock}", exposed_words(found))]
    return rows if change is None else [*rows, ("a shorter step", str(change))]
