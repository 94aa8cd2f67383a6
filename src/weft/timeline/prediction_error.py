"""How far a prediction is off: one figure with one sign, wherever predicted meets measured."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Values = TypeVar("_Values", float, npt.NDArray[np.float64])


def prediction_error(predicted: _Values, measured: _Values) -> _Values:
    """The relative error of a prediction, predicted / measured - 1: negative where it was too short."""
    return predicted / measured - 1.0


def error_text(error: float) -> str:
    """The figure as people read it, with its sign; "-" where nothing was measured."""
    return f"{error:+.1%}" if math.isfinite(error) else "-"
