"""Round numbers along a time axis."""

from __future__ import annotations

import math

_UNITS = (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1))


def time_ticks(span_ns: int, most: int) -> list[tuple[int, str]]:
    """(nanoseconds, label) of at most `most` round times from 0 to `span_ns`, all in one unit."""
    if span_ns <= 0 or most < 2:
        return [(0, "0")]
    raw = span_ns / (most - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = max(1, round(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)))
    unit, factor = next((name, size) for name, size in _UNITS if step >= size)
    return [(at, f"{at / factor:g} {unit}") for at in range(0, span_ns + 1, step)]
