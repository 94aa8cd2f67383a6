"""The sign and the words of a prediction's error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.scoring.metrics import Point, figures_of
from weft.timeline.figures import error_text, prediction_error


def test_a_prediction_that_is_too_short_has_a_negative_error():
    assert prediction_error(0.9, 1.0) == pytest.approx(-0.1)
    assert prediction_error(1.1, 1.0) == pytest.approx(0.1)
    errors = prediction_error(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    assert errors.tolist() == [-0.5, 0.5]


def test_its_words_keep_the_sign_and_say_nothing_where_nothing_was_measured():
    errors = (-0.127, 0.0, 1.0, math.inf)
    assert [error_text(error) for error in errors] == ["-12.7%", "+0.0%", "+100.0%", "-"]


def test_scores_are_of_the_same_error():
    points = [
        Point(measured_s=2.0, predicted_s=predicted_s, low_s=0.0, high_s=9.0, fits=True)
        for predicted_s in (1.0, 2.5)
    ]
    assert figures_of(points).max_ape == abs(prediction_error(1.0, 2.0)) == 0.5
