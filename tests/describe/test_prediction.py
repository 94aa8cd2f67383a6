from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.prediction import Prediction

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
    needs = [prediction.peaks_at(risk) for risk in (low, high, 0.5)]
    assert all(more >= less for two in pairwise(needs) for more, less in zip(*two, strict=True))
    assert needs[-1] == list(prediction.peak_bytes)


@given(peaks, risks)
def test_the_tightest_rank_decides_the_chance(pairs: list[tuple[int, int]], risk: float) -> None:
    pairs = [(peak, half + 1000) for peak, half in pairs]
    prediction = predicted(pairs)
    rooms = prediction.peaks_at(risk)
    assert prediction.chance_to_fit(rooms) == pytest.approx(1.0 - risk, abs=1e-3)
    tighter = [*rooms[:-1], prediction.peak_bytes[-1]]
    assert prediction.chance_to_fit(tighter) == pytest.approx(0.5)
    assert prediction.chance_to_fit([2**40] * len(rooms)) > 0.999


@given(peaks, risks)
def test_peaks_of_earlier_files_are_exact(pairs: list[tuple[int, int]], risk: float) -> None:
    prediction = predicted(pairs, exact=True)
    assert prediction.peaks_at(risk) == list(prediction.peak_bytes)
    assert prediction.chance_to_fit(prediction.peak_bytes) == 1.0
    assert prediction.chance_to_fit([peak - 1 for peak in prediction.peak_bytes]) == 0.0
