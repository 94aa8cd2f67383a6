from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.prediction import COMMUNICATOR_SPREAD, Prediction, margin_at

peaks = st.lists(st.tuples(st.integers(1, 2**37), st.integers(0, 2**33)), min_size=1, max_size=5)
# Odds that a normal distribution tells apart from a certainty.
risks = st.floats(0.001, 0.5)


def predicted(pairs: list[tuple[int, int]], *, exact: bool = False) -> Prediction:
    held = tuple(peak for peak, _ in pairs)
    high = () if exact else tuple(peak + half for peak, half in pairs)
    times = dict.fromkeys(("step_s", "step_low_s", "step_high_s", "first_step_s"), 1.0)
    return Prediction(**times, peak_bytes=held, peak_high_bytes=high, source="test")


@given(peaks, risks, risks)
def test_a_smaller_risk_needs_more_memory(pairs: list[tuple[int, int]], one: float, other: float) -> None:
    low, high = sorted((one, other))
    prediction = predicted(pairs)
    needs = [prediction.needs_at(risk) for risk in (low, high, 0.5)]
    assert all(more >= less for two in pairwise(needs) for more, less in zip(*two, strict=True))
    assert needs[-1] == list(prediction.peak_bytes)


@given(peaks, risks)
def test_the_tightest_rank_decides_the_chance(pairs: list[tuple[int, int]], risk: float) -> None:
    pairs = [(peak, half + 1000) for peak, half in pairs]
    prediction = predicted(pairs)
    rooms = prediction.needs_at(risk)
    assert prediction.chance_to_fit(rooms) == pytest.approx(1.0 - risk, abs=1e-3)
    tighter = [*rooms[:-1], prediction.peak_bytes[-1]]
    assert prediction.chance_to_fit(tighter) == pytest.approx(0.5)
    assert prediction.chance_to_fit([2**40] * len(rooms)) > 0.999


@given(peaks, st.integers(1, 2**34), st.floats(0.001, 0.49))
def test_communicators_count_whole_and_with_their_interval(
    pairs: list[tuple[int, int]], beside: int, risk: float
) -> None:
    alone = predicted(pairs)
    both = alone.model_copy(update={"communicator_bytes": (beside,) * len(pairs)})
    assert both.needed_bytes == both.needs_at(0.5) == [peak + beside for peak in alone.peak_bytes]
    half = margin_at(risk) * COMMUNICATOR_SPREAD * beside
    for less, more in zip(alone.needs_at(risk), both.needs_at(risk), strict=True):
        # Independent errors: not less than the larger one, not more than both.
        assert beside - 1 <= more - less <= beside + half + 1
        assert more >= beside + half - 1
    rooms = both.needs_at(risk)
    assert both.chance_to_fit(rooms) <= alone.chance_to_fit(rooms)


@given(peaks, risks)
def test_peaks_of_earlier_files_are_exact(pairs: list[tuple[int, int]], risk: float) -> None:
    prediction = predicted(pairs, exact=True)
    assert prediction.needs_at(risk) == list(prediction.peak_bytes)
    assert prediction.chance_to_fit(prediction.peak_bytes) == 1.0
    assert prediction.chance_to_fit([peak - 1 for peak in prediction.peak_bytes]) == 0.0
