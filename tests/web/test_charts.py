"""Axes of charts: marks are inside, rise, and are never fewer than two."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.web.charts import Axis, scale_of


@given(low=st.floats(1e-9, 1e12), ratio=st.floats(1.0, 1e6))
def test_a_logarithmic_axis_has_marks_wherever_its_values_lie(low: float, ratio: float) -> None:
    scale = scale_of(Axis(label="", logarithmic=True), [low, low * ratio], 0.0, 100.0)
    places = [scale(value) for value, _ in scale.ticks()]
    assert 2 <= len(places) <= 40
    assert places == sorted(places)
    assert -1e-6 <= places[0] < places[-1] <= 100.0 + 1e-6
