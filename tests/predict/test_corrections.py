"""Laws of what measured steps do to predictions."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.observed import observed, several

from weft.describe.prediction import END_OF_INTERVAL, SHARED
from weft.predict.corrections import (
    MOST,
    UNMEASURED_MEMORY,
    Correction,
    Peaks,
    fit,
    left_out,
    newest,
    posterior,
    spread_of,
)

ratios = st.floats(0.2, 5.0)
spreads = st.floats(0.01, 0.4)
samples = st.lists(ratios, min_size=1, max_size=12)


@given(spreads)
def test_nothing_measured_changes_nothing(spread: float) -> None:
    assert fit([]) is None
    found = posterior([], spread)
    assert found.log_ratio == 0.0
    assert found.shared_variance + found.own_variance == pytest.approx(spread**2)
    assert found.shared_variance == pytest.approx(SHARED * spread**2)


@given(samples, st.randoms(use_true_random=False), ratios)
def test_order_and_scale_play_no_part(measured: list[float], random, scale: float) -> None:
    plans = several(measured, computations=1.5)
    shuffled = random.sample(plans, len(plans))
    assert fit(shuffled) == fit(plans)
    larger = fit(several(measured, computations=1.5, predicted_step_s=0.02 * scale))
    found = fit(plans)
    assert found is not None
    assert larger is not None
    assert larger.factors == found.factors
    assert larger.step == pytest.approx(found.step)
    assert larger.own_variance == pytest.approx(found.own_variance, abs=1e-12)


@given(ratios, st.floats(0.05, 0.4))
def test_many_plans_that_agree_are_believed(ratio: float, half_width: float) -> None:
    found = fit(several([ratio] * 200, half_width=half_width))
    assert found is not None
    assert math.log(found.step) == pytest.approx(math.log(ratio), rel=0.01, abs=1e-9)
    assert found.shared < 0.9


@given(samples, spreads)
def test_a_correction_lies_between_no_change_and_the_median(measured: list[float], spread: float) -> None:
    residuals = [math.log(ratio) for ratio in measured]
    found, middle = posterior(residuals, spread), median(residuals)
    assert min(0.0, middle) <= found.log_ratio <= max(0.0, middle)


@given(st.floats(-1.0, 1.0), st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30), spreads)
def test_plans_no_further_apart_than_declared_never_widen_the_interval(
    shared: float, own: list[float], spread: float
) -> None:
    apart = math.sqrt(1.0 - SHARED) * spread / 2.0
    found = posterior([shared + apart * one for one in own], spread)
    assert found.shared_variance + found.own_variance <= spread**2


@given(st.lists(st.floats(0.9, 1.1), min_size=8, max_size=8), st.floats(2.0, 1e6))
def test_one_plan_that_met_something_else_hardly_matters(measured: list[float], wild: float) -> None:
    calm = fit(several([*measured, 1.1]))
    met = fit(several([*measured, wild]))
    assert calm is not None
    assert met is not None
    assert met.step == pytest.approx(calm.step, rel=0.25)
    assert met.step < 1.2


@pytest.mark.parametrize("farther", [1.0, 8.0])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 30])
def test_the_interval_holds_nine_of_ten_steps_of_normal_residuals(count: int, farther: float) -> None:
    """Once something is measured also where what plans share is far larger than was declared."""
    spread, tries = spread_of(0.7, 1.3), 1500
    random = np.random.default_rng(count)
    inside = 0
    for _ in range(tries):
        shared = random.normal(0.0, farther * math.sqrt(SHARED) * spread)
        residuals = shared + random.normal(0.0, math.sqrt(1.0 - SHARED) * spread, count + 1)
        found = posterior(residuals[1:].tolist(), spread)
        half = END_OF_INTERVAL * math.sqrt(found.shared_variance + found.own_variance)
        inside += abs(residuals[0] - found.log_ratio) <= half
    assert 0.88 <= inside / tries <= 1.0
    if count >= 8:
        assert inside / tries <= 0.94


def test_plans_further_apart_than_declared_widen_it() -> None:
    found = fit(several([1.0, 2.0, 3.0, 1.2, 4.0, 1.7]))
    assert found is not None
    low, high = found.interval(0.7, 1.3)
    assert low < 0.7
    assert high > 1.3


def test_what_is_measured_by_itself_is_corrected_by_itself() -> None:
    found = fit(several([2.5] * 50, computations=3.0))
    assert found is not None
    # A quarter of the step was as predicted.
    assert found.factors["computations", "cpu"] == pytest.approx(3.0, rel=0.02)
    assert found.step == pytest.approx(1.0, abs=0.02)
    assert found.messages == found.collectives == found.step
    assert found.computations("cpu") == pytest.approx(3.0, rel=0.03)
    assert found.computations("other") == found.step


@given(samples.filter(lambda some: len(some) > 1), ratios)
def test_a_plan_that_is_left_out_does_not_predict_itself(measured: list[float], other: float) -> None:
    before, after = left_out(several(measured))[0], left_out(several([other, *measured[1:]]))[0]
    assert (before.step_s, before.low_s, before.high_s) == (after.step_s, after.low_s, after.high_s)
    assert before.low_s < before.step_s < before.high_s


def test_parts_that_were_hardly_measured_are_corrected_with_the_whole_step() -> None:
    found = fit(several([2.5, 2.5], computations=100.0))
    assert found is not None
    assert found.factors == {}
    assert 2.0 < found.step < 2.5


def test_a_single_plan_keeps_its_prediction_however_often_it_was_measured() -> None:
    again = [observed(2.0, time_s=float(place)) for place in range(3)]
    for one in left_out(again):
        assert one.step_s == one.observation.predicted_step_s
        assert (one.low_s, one.high_s) == pytest.approx((0.014, 0.026))
        assert not one.inside


def test_a_plan_that_is_declared_less_sure_stays_less_sure() -> None:
    found = fit(several([1.0, 1.02, 0.98]))
    assert found is not None
    low, high = found.interval(0.7, 1.3)
    assert low * high == pytest.approx(1.0)
    assert found.interval(0.9, 1.1) == (low, high)
    wider = found.interval(0.4, 1.6)
    assert math.log(wider[1]) / math.log(high) == pytest.approx(spread_of(0.4, 1.6) / spread_of(0.7, 1.3))


def test_it_covers_the_devices_and_sources_that_it_was_learned_on() -> None:
    found = Correction(sources={"cpu": "data sheet", "gpu": "layer profile"})
    assert found.covers({"cpu": "data sheet"})
    assert not found.covers({"cpu": "measured machine"})
    assert not found.covers({"tpu": "data sheet"})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200)), max_size=120), st.randoms())
def test_the_newest_measurements_are_kept_each_once(pairs: list[tuple[int, int]], random) -> None:
    some = [observed(1.0, plan_id=f"{plan:016x}", time_s=float(time)) for plan, time in pairs]
    kept = newest(some)
    assert len(kept) == min(MOST, len(set(pairs)))
    assert [one.time_s for one in kept] == sorted(one.time_s for one in kept)
    assert newest(random.sample(some, len(some)) + list(kept)) == kept


@given(ratios, st.integers(1, 4), st.integers(5, 12))
def test_measured_peaks_are_corrected_by_their_median_and_apart_from_steps(
    ratio: float, outliers: int, others: int
) -> None:
    """Each run by the median of its ranks; runs without measured peaks say nothing of memory."""
    plans = several([1.0] * others, peak=ratio)
    found = fit(plans)
    assert found is not None
    assert found.memory.count == others
    assert math.log(found.memory.factor) == pytest.approx(math.log(ratio), abs=0.02)
    assert found.memory.widening < 1.0
    unmeasured = fit(several([1.0] * others))
    assert unmeasured is not None
    assert unmeasured == replace(found, memory=UNMEASURED_MEMORY)
    disturbed = fit([*plans, *several([1.0] * outliers, peak=7.0 * ratio)])
    assert disturbed is not None
    assert math.log(disturbed.memory.factor) == pytest.approx(math.log(ratio), abs=0.1)


def test_runs_that_disagree_widen_the_interval_of_memory() -> None:
    apart = fit([observed(1.0, peak=peak, time_s=peak) for peak in (0.8, 1.0, 1.2, 0.9, 1.1)])
    alike = fit([observed(1.0, peak=1.0, time_s=float(time)) for time in range(5)])
    assert apart is not None
    assert alike is not None
    assert apart.memory.widening > 2.0 > 1.0 > alike.memory.widening
    assert apart.memory.in_words() == "measured in 5 runs"
    with pytest.raises(ValueError, match="measured_bytes: 1 peaks for 2 ranks"):
        Peaks(predicted_bytes=(1, 2), measured_bytes=(1,), half_width=0.1)
