"""Axes of charts: marks are inside, rise, and are never fewer than two; times are round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.web.charts.axes import BYTE_UNITS, SECOND_UNITS, Axis, scale_of, time_ticks


@given(low=st.floats(1e-9, 1e12), ratio=st.floats(1.0, 1e6))
def test_a_logarithmic_axis_has_marks_wherever_its_values_lie(low: float, ratio: float) -> None:
    scale = scale_of(Axis(label="", logarithmic=True), [low, low * ratio], 0.0, 100.0)
    places = [scale(value) for value, _ in scale.ticks()]
    assert 2 <= len(places) <= 40
    assert places == sorted(places)
    assert -1e-6 <= places[0] < places[-1] <= 100.0 + 1e-6


@given(st.integers(1, 10**13), st.integers(2, 12))
def test_ticks_are_round_few_and_inside(span_ns: int, most: int) -> None:
    ticks = time_ticks(span_ns, most)
    assert 1 <= len(ticks) <= most
    places = [at for at, _ in ticks]
    assert places[0] == 0
    assert places[-1] <= span_ns
    assert len(set(places)) == len(places)
    assert len({label for _, label in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("span_ns", "last"), [(473_000_000, "400 ms"), (28_500_000_000, "20 s"), (7, "6 ns")]
)
def test_ticks_of_known_spans(span_ns: int, last: str) -> None:
    assert time_ticks(span_ns, 5)[-1][1] == last


@given(
    low=st.floats(1e-9, 1e12), ratio=st.floats(1.0, 1e6), units=st.sampled_from([SECOND_UNITS, BYTE_UNITS])
)
def test_all_ticks_of_an_axis_have_one_unit(
    low: float, ratio: float, units: tuple[tuple[str, float], ...]
) -> None:
    axis = Axis(label="", logarithmic=True, units=units)
    ticks = scale_of(axis, [low, low * ratio], 0.0, 100.0).ticks()
    assert len({text.split()[1] for _, text in ticks}) == 1
    size = dict(units)[ticks[0][1].split()[1]]
    assert [float(text.split()[0]) * size for _, text in ticks] == pytest.approx(
        [at for at, _ in ticks], rel=1e-4
    )
