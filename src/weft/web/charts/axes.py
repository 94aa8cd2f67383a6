"""Axes: scales from values to pixels, and round numbers as ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

_ROUND = (1, 2, 5)
_UNITS = (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1))
SECOND_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis. `text` formats a value. `ticks` are (value, text) pairs; default: round numbers.

    `units` are (name, size) pairs, largest first. All ticks of an axis have the same one; then `text` is
    not used.
    """

    label: str
    logarithmic: bool = False
    units: tuple[tuple[str, float], ...] = ()
    text: Callable[[float], str] = "{:g}".format
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from values of an axis (`low` to `high`) to pixels (`start` to `end`)."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.axis.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        if self.axis.ticks:
            return [tick for tick in self.axis.ticks if self.low <= tick[0] <= self.high]
        values = _log_ticks(self.low, self.high) if self.axis.logarithmic else _linear_ticks(self.high)
        if not self.axis.units:
            return [(value, self.axis.text(value)) for value in values]
        units = self.axis.units
        unit, size = next((one for one in units if values[-1] >= one[1] * 0.9995), units[-1])
        return [(value, f"{value / size:.6g} {unit}") for value in values]


def scale_of(axis: Axis, values: list[float], start: float, end: float) -> Scale:
    """Build a scale from pixel `start` to `end` with room at its ends; a linear scale begins at 0."""
    low, high = min(values), max(values)
    if not axis.logarithmic:
        return Scale(axis, 0.0, 1.1 * high, start, end)
    room = max((high / low) ** 0.05, 1.05)
    return Scale(axis, low / room, high * room, start, end)


def grid_svg(across: Scale, up: Scale) -> str:
    parts = []
    for value, text in across.ticks():
        x = across(value)
        parts.append(
            f'<path class="weft-grid" d="M{x:.1f} {up.end}V{up.start}"/>'
            f'<text class="weft-soft weft-middle" x="{x:.1f}" y="{up.start + 15}">{escape(text)}</text>'
        )
    for value, text in up.ticks():
        y = up(value)
        parts.append(
            f'<path class="weft-grid" d="M{across.start:g} {y:.1f}H{across.end:g}"/>'
            f'<text class="weft-soft weft-end" x="{across.start - 6:g}" y="{y + 4:.1f}">{escape(text)}</text>'
        )
    return "".join(parts)


def time_ticks(span_ns: int, most: int) -> list[tuple[int, str]]:
    """Return (nanoseconds, label) of at most `most` round times from 0 to `span_ns`, all in one unit."""
    if span_ns <= 0 or most < 2:
        return [(0, "0")]
    step = max(1, round(_round_step(span_ns / (most - 1))))
    last = span_ns // step * step
    unit, factor = next((name, size) for name, size in _UNITS if max(step, last) >= size)
    return [(at, f"{at / factor:g} {unit}") for at in range(0, span_ns + 1, step)]


def _round_step(least: float) -> float:
    """Return the smallest of ..., 0.2, 0.5, 1, 2, 5, 10, ... that reaches `least`, within 0.1 %."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (*_ROUND, 10) if factor * power >= least * 0.999)


def _linear_ticks(high: float, low: float = 0.0) -> list[float]:
    step = _round_step((high - low) / 5)
    return [step * count for count in range(math.ceil(low / step), int(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, also times 2 and 5 below three decades; equal steps if fewer than two fit."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = _ROUND if math.log10(high / low) < 3 else (1,)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    inside = [value for value in values if low <= value <= high]
    return inside if len(inside) > 1 else _linear_ticks(high, low)
