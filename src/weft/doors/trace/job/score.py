"""Errors of the simulator on a trace: steps from the trace's own times against the measured ones."""

from __future__ import annotations

from collections.abc import Mapping

from weft.doors.trace.job.losses import Losses
from weft.scoring.metrics import Figures, Point, figures_of

OWN, USUAL = "own times of the step", "usual times of each stage"


def replay_figures(losses: Losses) -> Mapping[str, Figures]:
    """Return the figures of two predictions of every step.

    One takes the step's own times: what it misses are delays between operations. The other takes the median
    of each operation over all steps, as profiles do. It also misses what steps differ by.
    """
    measured = losses.measured_s.tolist()
    predicted = {OWN: losses.simulated_s.tolist(), USUAL: [losses.usual_s] * len(measured)}
    return {
        name: figures_of([_point(*pair) for pair in zip(measured, steps, strict=True)])
        for name, steps in predicted.items()
    }


def _point(measured_s: float, predicted_s: float) -> Point:
    return Point(
        measured_s=measured_s, predicted_s=predicted_s, low_s=predicted_s, high_s=predicted_s, fits=True
    )
