"""Measured tables of (size, seconds) or (size, bytes), read between and beyond their points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def value_at(points: Sequence[tuple[float, float]], size: float) -> float:
    """What was measured for `size`, by a straight line between the two nearest points.

    Below the smallest measured size the value stays what it was there, because overhead rules; above the
    largest it grows in proportion. `points` rise in size.
    """
    index = bisect_left(points, (size,))
    if index == 0:
        return points[0][1]
    if index == len(points):
        largest, value = points[-1]
        return value * size / largest if largest else value
    (left, left_value), (right, right_value) = points[index - 1], points[index]
    return left_value + (right_value - left_value) * (size - left) / (right - left)


def seconds_of_speeds(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(size, seconds) from (size, size per second)."""
    return tuple((size, size / speed) for size, speed in points)
