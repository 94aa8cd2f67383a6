"""Figures of predictions: equal to scipy's, and what each is said to be."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.scoring.metrics import Point, figures_of, kendall, pooled_figures, spearman

seconds = st.floats(0.01, 1e4)
# Few different values, so that there are ties.
pairs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=40)


def point(measured_s: float | None, predicted_s: float, *, fits: bool = True, width: float = 0.1) -> Point:
    low, high = predicted_s * (1 - width), predicted_s * (1 + width)
    return Point(measured_s=measured_s, predicted_s=predicted_s, low_s=low, high_s=high, fits=fits)


@given(pairs)
def test_rank_correlations_are_those_of_scipy(values: list[tuple[int, int]]) -> None:
    # Every runner would import it with the file.
    from scipy import stats

    left, right = (np.array(column, dtype=np.float64) for column in zip(*values, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stats.spearmanr(left, right).statistic, stats.kendalltau(left, right).statistic
    for found, wanted in zip((spearman(left, right), kendall(left, right)), expected, strict=True):
        if math.isnan(wanted):
            assert found is None
        else:
            assert found == pytest.approx(wanted, abs=1e-12)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20))
def test_errors_and_regret(values: list[tuple[float, float]]) -> None:
    figures = figures_of([point(measured, predicted) for measured, predicted in values])
    errors = [abs(predicted / measured - 1) for measured, predicted in values]
    assert figures.mape == pytest.approx(sum(errors) / len(errors))
    assert figures.max_ape == pytest.approx(max(errors))
    assert figures.median_ape <= figures.max_ape
    chosen = min(values, key=lambda value: value[1])[0]
    assert figures.regret == pytest.approx(chosen / min(measured for measured, _ in values) - 1)
    assert figures.regret >= 0
    assert figures.half_width == pytest.approx(0.1)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20), st.floats(0.1, 10))
def test_a_common_factor_changes_neither_the_scaled_error_nor_the_ranking(
    values: list[tuple[float, float]], factor: float
) -> None:
    assume(len({predicted for _, predicted in values}) == len(values))
    one = figures_of([point(measured, predicted) for measured, predicted in values])
    other = figures_of([point(measured, predicted * factor) for measured, predicted in values])
    assert other.mape_scaled == pytest.approx(one.mape_scaled, rel=1e-6, abs=1e-9)
    assert other.spearman == pytest.approx(one.spearman, abs=1e-9)
    assert other.regret == pytest.approx(one.regret)


def test_what_fits_is_counted_both_ways() -> None:
    points = [
        point(1.0, 1.0),
        point(2.0, 2.0, fits=False),
        point(None, 3.0),
        point(None, 4.0, fits=False),
    ]
    figures = figures_of(points)
    assert (figures.n, figures.oom_missed, figures.oom_false, figures.oom_accuracy) == (2, 1, 1, 0.5)
    assert figures.mape == 0.0


def test_rankings_are_pooled_by_group() -> None:
    rising = [point(1.0, 1.0), point(2.0, 2.0), point(3.0, 3.0)]
    falling = [point(100.0, 200.0), point(200.0, 100.0)]
    pooled = pooled_figures({"a": rising, "b": falling})
    assert pooled.n == 5
    assert pooled.spearman == pytest.approx((3 * 1.0 + 2 * -1.0) / 5)
    assert pooled.kendall == pytest.approx((3 * 1.0 + 2 * -1.0) / 5)
    assert pooled.regret == pytest.approx((3 * 0.0 + 2 * 1.0) / 5)


def test_no_points_have_no_figures() -> None:
    figures = figures_of([])
    assert (figures.n, figures.mape, figures.regret, figures.oom_accuracy) == (0, None, None, None)
    assert figures_of([point(None, 1.0)]).oom_accuracy == 0.0
