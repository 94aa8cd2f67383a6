"""Figures of the quality of predictions: of times, of rankings, and of memory fit.

Spearman's and Kendall's correlations treat ties like `scipy.stats` (average ranks; tau-b). All figures are
fractions, not percents. A figure without any suitable row is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from weft.program.arrays import Floats
from weft.timeline.figures import prediction_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One scored row: seconds measured (None: out of memory) and predicted, with the predicted interval."""

    measured_s: float | None
    predicted_s: float
    low_s: float
    high_s: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of the predictions of a set of points.

    Attributes:
        n: points with a measured time.
        mape, median_ape, max_ape: mean, median and largest absolute relative error of the time.
        mape_scaled: `mape` after all predictions are multiplied by the median of measured / predicted.
        spearman, kendall: correlation of the ranks of predicted and measured times.
        regret: measured time of the point with the shortest prediction / shortest measured time - 1.
        oom_accuracy: share of all points with a right prediction of memory fit.
        oom_missed: points predicted to fit that did not; oom_false: points predicted not to fit that did.
        coverage: share of the measured times inside the predicted interval.
        half_width: median relative half-width of that interval.
    """

    n: int
    mape: float | None = None
    mape_scaled: float | None = None
    median_ape: float | None = None
    max_ape: float | None = None
    spearman: float | None
    kendall: float | None
    regret: float | None = None
    oom_accuracy: float | None
    oom_missed: int
    oom_false: int
    coverage: float | None = None
    half_width: float | None = None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


_RANKED = ("spearman", "kendall", "regret")
_SCALED = "mape_scaled"


def figures_of(points: Sequence[Point]) -> Figures:
    """Compute the figures of one group of points, such as all layouts of one model."""
    timed = [point for point in points if point.measured_s is not None]
    measured = np.array([point.measured_s for point in timed], dtype=np.float64)
    predicted = np.array([point.predicted_s for point in timed], dtype=np.float64)
    missed = sum(point.measured_s is None and point.fits for point in points)
    refused = sum(point.measured_s is not None and not point.fits for point in points)
    found = Figures(
        n=len(timed),
        spearman=spearman(predicted, measured),
        kendall=kendall(predicted, measured),
        oom_accuracy=1.0 - (missed + refused) / len(points) if points else None,
        oom_missed=missed,
        oom_false=refused,
    )
    if not timed:
        return found
    errors = np.abs(prediction_error(predicted, measured))
    scale = float(np.median(measured / predicted))
    inside = [point.low_s <= time <= point.high_s for point, time in zip(timed, measured, strict=True)]
    widths = [(point.high_s - point.low_s) / (2.0 * point.predicted_s) for point in timed]
    return Figures(
        **found.as_record()
        | {
            "mape": float(errors.mean()),
            "mape_scaled": float(np.abs(prediction_error(scale * predicted, measured)).mean()),
            "median_ape": float(np.median(errors)),
            "max_ape": float(errors.max()),
            "regret": float(measured[int(np.argmin(predicted))] / measured.min() - 1.0),
            "coverage": fmean(inside),
            "half_width": median(widths),
        }
    )


def pooled_figures(groups: Mapping[str, Sequence[Point]]) -> Figures:
    """Pool all points; figures that compare points, and `mape_scaled`, are group means weighted by n."""
    every = figures_of([point for points in groups.values() for point in points])
    parts = [figures_of(points) for points in groups.values()]
    weighted: dict[str, float | None] = {}
    for name in (*_RANKED, _SCALED):
        known = [(part.n, getattr(part, name)) for part in parts if getattr(part, name) is not None]
        total = sum(n for n, _ in known)
        weighted[name] = sum(n * value for n, value in known) / total if total else None
    return Figures(**every.as_record() | weighted)


def spearman(left: Floats, right: Floats) -> float | None:
    """Return Spearman's rank correlation; None for fewer than two points, or if all on a side are equal."""
    if len(left) < 2:
        return None
    ranks = [_average_ranks(values) for values in (left, right)]
    if any(np.ptp(values) == 0.0 for values in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def kendall(left: Floats, right: Floats) -> float | None:
    """Return Kendall's tau-b; None like `spearman`. Its memory grows with the square of the points."""
    if len(left) < 2:
        return None
    upper = np.triu_indices(len(left), 1)
    signs = [np.sign(values[:, None] - values[None, :])[upper] for values in (left, right)]
    untied = [np.count_nonzero(values) for values in signs]
    if not all(untied):
        return None
    return float((signs[0] * signs[1]).sum() / np.sqrt(float(untied[0]) * float(untied[1])))


def _average_ranks(values: Floats) -> Floats:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[which]
