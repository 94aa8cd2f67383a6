"""Times of unequal abstract stages, and their CSV file, one row for each."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from weft.describe.reading import read_text
from weft.errors import InputError, Violation

Number = int | float | str | Fraction

COLUMNS = ["forward", "backward"]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of one micro-batch on one stage: forward, and backward with its weight gradient."""

    forward: Fraction
    backward: Fraction


def exact(where: str, value: Number, *, zero: bool = False) -> Fraction:
    """Return the time as a fraction; a decimal keeps its typed value.

    Raises:
        InputError: for a time that is not finite, is negative, or is zero unless `zero` is True.
    """
    try:
        # str of a float is the decimal the user typed, not the binary fraction next to it.
        time = Fraction(str(value) if isinstance(value, float) else value)
    except (ValueError, ZeroDivisionError):
        raise InputError(Violation(where, f"{value!r} is not a finite time")) from None
    if time < 0 or (time == 0 and not zero):
        raise InputError(Violation(where, f"{value} must be {'0 or more' if zero else 'more than 0'}"))
    return time


def read_stage_times(path: Path) -> tuple[PassTimes, ...]:
    """Read a CSV file with the heading `forward,backward` and one row per stage, first stage first.

    Raises:
        InputError: naming every wrong line.
    """
    rows = [line.split(",") for line in read_text(path).splitlines()]
    heading = [word.strip().lower() for word in rows[0]] if rows else []
    if heading != COLUMNS:
        given = ",".join(heading) or "nothing"
        raise InputError(Violation(f"{path}, line 1", f"{given!r} is not the heading", ",".join(COLUMNS)))
    problems: list[Violation] = []
    stages: list[PassTimes] = []
    for line, row in enumerate(rows[1:], start=2):
        where = f"{path}, line {line}"
        if len(row) != len(COLUMNS):
            problems.append(Violation(where, f"has {len(row)} values; a stage has {len(COLUMNS)}"))
            continue
        times = []
        for name, value in zip(COLUMNS, row, strict=True):
            try:
                times.append(exact(f"{where}, {name}", value.strip()))
            except InputError as error:
                problems += error.violations
        if len(times) == len(COLUMNS):
            stages.append(PassTimes(*times))
    if not problems and not stages:
        problems.append(Violation(str(path), "has no stage; one row per stage is needed"))
    if problems:
        raise InputError(problems)
    return tuple(stages)
