"""Quantities with units in files of people: ``"80 GB"``, ``"25 Gbit/s"``, ``"3 us"``, ``"312 TFLOP/s"``.

A number without quotes is in SI base units (bytes, bytes/s, seconds, flop/s); a string needs its unit.
Unit names are case-sensitive, because ``Gbit/s`` and ``GB/s`` differ by eight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from weft.errors import InputError, Violation, nearest

_DECIMAL: Mapping[str, float] = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY: Mapping[str, float] = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTES: Mapping[str, float] = {f"{prefix}B": scale for prefix, scale in {**_DECIMAL, **_BINARY}.items()}
BYTES_PER_SECOND: Mapping[str, float] = {
    **{f"{unit}/s": scale for unit, scale in BYTES.items()},
    **{f"{prefix}bit/s": scale / 8 for prefix, scale in _DECIMAL.items()},
}
SECONDS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
FLOPS_PER_SECOND: Mapping[str, float] = {
    f"{prefix}FLOP/s": scale for prefix, scale in {**_DECIMAL, "E": 1e18}.items()
}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*", re.ASCII)

# Above any machine's quantities; their sums and products do not overflow.
_LARGEST = 1e30


def parse_bytes(value: object, where: str = "") -> int:
    """Parse a positive count of bytes: ``"80 GB"`` (decimal), ``"80 GiB"`` (binary) or a number.

    Raises:
        InputError: for anything else, naming `where`.
    """
    number = _parse(value, where, BYTES, "80 GB")
    if number < 1:
        raise _refusal(where, value, "at least 1 byte is needed")
    # A float cannot represent all integers above 2**53.
    return value if isinstance(value, int) else round(number)


def parse_bytes_per_second(value: object, where: str = "") -> float:
    """Parse a positive bandwidth in bytes/s: ``"300 GB/s"``, ``"25 Gbit/s"`` or a number.

    Raises:
        InputError: for anything else, naming `where`.
    """
    return _positive(_parse(value, where, BYTES_PER_SECOND, "300 GB/s"), value, where)


def parse_seconds(value: object, where: str = "") -> float:
    """Parse a time in seconds, zero allowed: ``"3 us"``, ``"5 ms"`` or a number.

    Raises:
        InputError: for anything else, naming `where`.
    """
    return _parse(value, where, SECONDS, "3 us")


def parse_flops_per_second(value: object, where: str = "") -> float:
    """Parse a positive speed in flop/s: ``"312 TFLOP/s"`` or a number.

    Raises:
        InputError: for anything else, naming `where`.
    """
    return _positive(_parse(value, where, FLOPS_PER_SECOND, "312 TFLOP/s"), value, where)


def format_bytes(count: float) -> str:
    """Return decimal bytes for people: ``79.2 GB``."""
    return _format(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """Return a count for people: ``6.7 B`` (billions), ``12.5 k``."""
    return _format(count, ("", "k", "M", "B", "T")).rstrip()


def counted(count: int, what: str) -> str:
    """Return a count of things in words: ``1 stage``, ``2 stages``, ``3 micro-batches``."""
    ending = "es" if what.endswith(("ch", "s")) else "s"
    return f"{count} {what}{ending * (count != 1)}"


def format_flops_per_s(rate: float) -> str:
    """Return operations per second for people: ``312 TFLOP/s``."""
    return _format(rate, tuple(f"{prefix}FLOP/s" for prefix in _DECIMAL))


def format_odds(probability: float) -> str:
    """Return a probability of at most a half, and above 0, in words: 1 of 5."""
    return f"1 of {round(1.0 / probability)}"


def format_seconds(seconds: float) -> str:
    """Return a time for people: ``3.2 us``, ``15.8 ms``, ``1.25 s``, ``2 h 05 min``."""
    magnitude = abs(seconds)
    if magnitude >= 3600:
        minutes = round(magnitude / 60)
        return f"{'-' if seconds < 0 else ''}{minutes // 60} h {minutes % 60:02d} min"
    if magnitude >= 300:
        return f"{seconds / 60:.1f} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # 0.9995 of a unit prints as "1.00" of it, not as "1000" of the next smaller unit.
        if magnitude >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    # What is left of a difference of equal sums is no time.
    return f"{_three_digits(seconds / 1e-9)} ns" if magnitude >= 5e-12 else "0 s"


def exact_text(value: float, units: Mapping[str, float], parse: Callable[[object], float]) -> str | float:
    """Return the shortest ``"number unit"`` that `parse` reads as exactly `value`, else `value` itself."""
    written = []
    for unit, scale in units.items():
        number = float(f"{value / scale:.10g}")
        if number < 1 and unit != "ns":
            continue
        text = f"{number:.10g} {unit}"
        # Rounding to ten digits may still give the exact value.
        if number * scale <= _LARGEST and parse(text) == value:
            written.append(text)
    return min(written, key=len, default=value)


def _parse(value: object, where: str, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refusal(where, value, f"a quantity such as {example!r} is needed")
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise _refusal(where, value, f"not a number and a unit such as {example!r}")
        digits, unit = match.groups()
        if unit not in units:
            allowed = ", ".join(units)
            problem = f"{unit!r} is not a unit; {allowed}" if unit else f"the unit is missing; {allowed}"
            # Capitals are the most common mistake, so prefer units that differ only in capitals.
            same = [known for known in units if known.lower() == unit.lower()]
            suggestion = same[0] if same else nearest(unit, units)
            raise _refusal(where, value, problem, f"{digits} {suggestion}" if suggestion else "")
        number = float(digits)
        if math.isfinite(number):
            # Decimal arithmetic: "10 us" becomes the float nearest to 1e-5.
            number = float(Decimal(digits) * Decimal(repr(units[unit])))
    else:
        number = float(value) if abs(value) <= _LARGEST else math.inf
    if not 0 <= number <= _LARGEST:
        raise _refusal(where, value, "neither negative, infinite nor undefined quantities are allowed")
    return number


def _positive(number: float, value: object, where: str) -> float:
    if number == 0:
        raise _refusal(where, value, "zero is not allowed")
    return number


def _refusal(where: str, value: object, problem: str, nearest_valid: str = "") -> InputError:
    return InputError(Violation(where, f"{shown(value)}: {problem}", nearest_valid))


def shown(value: object) -> str:
    """Return the original text of `value`; long texts are truncated."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number that is too long"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _format(count: float, units: tuple[str, ...]) -> str:
    magnitude = 0
    while abs(count) >= 999.5 and magnitude + 1 < len(units):
        count /= 1000
        magnitude += 1
    number = f"{count:.0f}" if magnitude == 0 and count == int(count) else _three_digits(count)
    return f"{number} {units[magnitude]}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:.{decimals}f}"
