"""The common parts of rules: a finding, and the arithmetic of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt
from typing import Any

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.units import format_count
from weft.doors.configuration import AUTO, Configuration, truth, whole
from weft.errors import Violation


class Severity(StrEnum):
    """`WRONG` will not start or contradicts itself, `IDLE` has no effect, `SLOW` costs time or memory."""

    WRONG = "wrong"
    IDLE = "no effect"
    SLOW = "wasteful"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a configuration: the place, the given value, the allowed values, the nearest one."""

    severity: Severity
    violation: Violation

    def __str__(self) -> str:
        return f"{self.severity}: {self.violation}"


Rule = Callable[[Configuration], Iterable[Finding]]


def wrong(where: str, problem: str, nearest: str = "") -> Finding:
    return Finding(Severity.WRONG, Violation(where, problem, nearest))


def idle(where: str, problem: str, nearest: str = "") -> Finding:
    return Finding(Severity.IDLE, Violation(where, problem, nearest))


def slow(where: str, problem: str, nearest: str = "") -> Finding:
    return Finding(Severity.SLOW, Violation(where, problem, nearest))


def number(given: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """Return the whole number under a key, or the default where there is none."""
    value = whole(given.get(key))
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def on(given: Mapping[str, Any], key: str) -> bool:
    """Return True if an option is given and not switched off; `auto` does not count."""
    return given.get(key) != AUTO and truth(given.get(key))


def nearest_multiple(value: int, unit: int) -> int:
    """Return the multiple of `unit` nearest to `value`, at least one of it."""
    return unit * max(1, round(value / unit))


def nearest_divisor(value: int, of: int) -> int:
    """Return the divisor of `of` nearest to `value`, the smaller of equals."""
    small = [count for count in range(1, isqrt(of) + 1) if of % count == 0]
    return min({*small, *(of // count for count in small)}, key=lambda count: (abs(count - value), count))


def buckets_are_parts(
    configuration: Configuration, key: str, tensor_ranks: int, holders: int
) -> Iterator[Finding]:
    """Find a bucket that holds all gradients of a device: `holders` divide a tensor rank's parameters."""
    bucket, model = number(configuration.given, key), configuration.model
    if bucket is None or not isinstance(model, ModelConfig):
        return
    held = layer_graph(model).parameters(tensor_ranks) // holders
    if bucket >= held:
        problem = f"{bucket} elements hold all {format_count(held)} gradients of a device; nothing overlaps"
        yield slow(key, problem, str(max(1, held // 8)))
