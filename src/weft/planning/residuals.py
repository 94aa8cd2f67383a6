"""From a measured run to a lesson for predictions, and into the file that keeps it.

Files of measured steps become lessons again: one on predictions from each combination of sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from weft.describe.prediction import Prediction
from weft.planning.planned_job import PlannedJob
from weft.predict.corrections import Correction, Key, LeftOut, Observation, Part, Peaks, fit, left_out
from weft.predict.corrections_file import (
    Residuals,
    load_residuals,
    read_residuals,
    residual_files,
    save_residuals,
)
from weft.predict.predict import PredictedStep, predict
from weft.program.arrays import Floats
from weft.program.kinds import is_collective, is_compute, is_send, message_kinds
from weft.program.program import Program
from weft.timeline.figures import prediction_error
from weft.timeline.medians import from_step, instructions
from weft.timeline.timeline import Timeline

# A part is slowed by this fraction to measure its share of the step.
_NUDGE = 0.02


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """The lesson of a file of measured steps for predictions from one combination of sources.

    Attributes:
        path: the file. residuals: its contents.
        observations: those with predictions from these sources.
        correction: the correction fitted to them.
    """

    path: Path
    residuals: Residuals
    observations: tuple[Observation, ...]
    correction: Correction

    @property
    def subject(self) -> str:
        """Model, precision, devices and sources in words."""
        hardware = self.residuals.hardware.rpartition("-")[0]
        sources = ", ".join(sorted(set(self.correction.sources.values())))
        return f"{self.residuals.model} in {self.residuals.precision} on {hardware}, {sources}"

    @property
    def error(self) -> float:
        """Median error of the predictions without a correction."""
        seen = self.observations
        return median(prediction_error(one.predicted_step_s, one.measured_step_s) for one in seen)

    @cached_property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Every plan as predicted from all others."""
        return left_out(self.observations)


def measured_peaks(result: Mapping[str, Any]) -> Sequence[int]:
    """Return the peak of memory of every rank in the result of a run; empty if it has none.

    It is the memory that torch has allocated on an accelerator, or the process without its libraries.
    """
    return result.get("max_device_bytes") or result.get("tensor_bytes") or ()


def observe(
    job: PlannedJob,
    measured: Timeline,
    *,
    step_s: float,
    warm_up: int,
    time_s: float,
    peak_bytes: Sequence[int] = (),
) -> Observation:
    """Compare a job's measured steps with its prediction without any correction.

    Args:
        measured: instructions of the run; its first `warm_up` steps do not count.
        step_s: seconds of a step.
        time_s: the time of measurement, in seconds since 1970.
        peak_bytes: the peak of memory of every rank, if it was measured.

    Raises:
        InputError: see `predict`.
    """
    problem = job.problem
    bare = _predicted(job, None)
    low, high = bare.prediction.step_low_s, bare.prediction.step_high_s
    ratios = _ratios(job, bare, from_step(measured, int(measured.step.min()) + warm_up))
    shares = _shares(job, bare, tuple(ratios))
    return Observation(
        plan_id=job.plan.plan_id,
        time_s=time_s,
        sources=problem.measurements.sources(problem.job.cluster, problem.job.precision),
        half_width=(high - low) / (high + low),
        predicted_step_s=bare.prediction.step_s,
        measured_step_s=step_s,
        parts=tuple(
            Part(kind=key[0], device=key[1], share=shares[key], ratio=ratio) for key, ratio in ratios.items()
        ),
        peaks=_peaks(bare.prediction, peak_bytes),
    )


def learn(job: PlannedJob, observations: Sequence[Observation], home: Path) -> Lesson:
    """Add measured steps of a job's model and cluster, at least one, to their file in `home`.

    Raises:
        InputError: when the file is broken or cannot be written.
    """
    asked = job.problem.job
    known = load_residuals(asked.graph, asked.precision, asked.cluster, home).with_more(observations)
    return _lesson(save_residuals(known, home), known, known.of(observations[-1].sources))


def lessons_in(home: Path) -> tuple[Lesson, ...]:
    """Return the lessons of all files of measured steps in `home`, by file and sources.

    Raises:
        InputError: when a file is broken.
    """
    files = ((path, read_residuals(path)) for path in residual_files(home))
    return tuple(_lesson(path, found, some) for path, found in files for some in found.by_sources())


def _lesson(path: Path, residuals: Residuals, observations: tuple[Observation, ...]) -> Lesson:
    correction = fit(observations)
    assert correction is not None, "there are observations of these sources"
    return Lesson(path=path, residuals=residuals, observations=observations, correction=correction)


def _predicted(job: PlannedJob, correction: Correction | None) -> PredictedStep:
    return predict(job.problem.corrected(correction).cost_model, job.plan, job.program)


def _peaks(bare: Prediction, measured_bytes: Sequence[int]) -> Peaks | None:
    if len(measured_bytes) != len(bare.peak_bytes) or min(measured_bytes) <= 0:
        return None
    fullest, high = max(zip(bare.peak_bytes, bare.peak_high_bytes, strict=True))
    return Peaks(
        predicted_bytes=bare.peak_bytes,
        measured_bytes=tuple(measured_bytes),
        half_width=high / fullest - 1.0,
    )


def _shares(job: PlannedJob, bare: PredictedStep, keys: Sequence[Key]) -> dict[Key, float]:
    """Return the share of each kind of instruction in the predicted step; together at most 1."""
    grown = {}
    for key in keys:
        slower = _predicted(job, Correction(factors={key: 1.0 + _NUDGE})).prediction.step_s
        grown[key] = max(0.0, (slower / bare.prediction.step_s - 1.0) / _NUDGE)
    # Where several paths are critical, each kind may lengthen one of them.
    total = max(1.0, sum(grown.values()))
    return {key: min(1.0, one / total) for key, one in grown.items()}


def _ratios(job: PlannedJob, bare: PredictedStep, measured: Timeline) -> dict[Key, float | None]:
    """Return measured over predicted time of each kind of instruction in the program."""
    program, cluster = job.program, job.problem.job.cluster
    found: dict[Key, float | None] = {}
    expected, happened = instructions(bare.simulation.timeline), instructions(measured)
    _, left, right = np.intersect1d(expected.id, happened.id, assume_unique=True, return_indices=True)
    expected, took_s = expected.take(left), happened.duration_s[right]
    # Computations contain the exchanges of tensor and context ranks, which have no measurements of their own.
    alone = all(len(copy.ranks) == 1 for stage in job.plan.stages for copy in stage.replicas)
    computes = is_compute(expected.kind)
    names = np.array([cluster.device_of(rank).name for rank in range(program.ranks)])
    for name in sorted(set(names.tolist())):
        rows = computes & (names[expected.rank] == name)
        found["computations", name] = _ratio(expected.duration_s[rows], took_s[rows]) if alone else None
    if is_send(program.columns.kind).any():
        found["messages", ""] = _message_ratio(program, bare, measured)
    collectives = is_collective(expected.kind)
    if collectives.any() or not alone:
        found["collectives", ""] = _ratio(expected.duration_s[collectives], took_s[collectives])
    return found


def _ratio(predicted_s: Floats, measured_s: Floats) -> float | None:
    predicted, measured = float(predicted_s.sum()), float(measured_s.sum())
    return measured / predicted if predicted > 0.0 and measured > 0.0 else None


def _message_ratio(program: Program, bare: PredictedStep, measured: Timeline) -> float | None:
    """Return the ratio of messages that a rank waited for: others are not measured from start to arrival."""
    receives = [receive for _, receive in message_kinds()]
    edges, kind = program.edges, program.columns.kind
    joins = is_send(kind[edges.source]) & np.isin(kind[edges.target], receives)
    sender = np.full(len(program), -1, dtype=np.int64)
    sender[edges.target[joins]] = edges.source[joins]
    rows = np.isin(measured.kind, receives) & (measured.start_ns > measured.posted_ns)
    sends = sender[measured.position[rows]]
    costs = bare.priced.costs
    predicted_s = (costs.occupancy + costs.latency)[sends] * costs.tick_s
    return _ratio(
        np.asarray(predicted_s, dtype=np.float64), (measured.end_ns - measured.start_ns)[rows] / 1e9
    )
