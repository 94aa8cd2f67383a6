"""Errors for people: the given value, the allowed values, the nearest valid choice.

`InputError` means an invalid input (exit code 2); `RunError` means a failed run (exit code 1).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from textwrap import shorten


@dataclass(frozen=True, slots=True)
class Violation:
    """One mistake in an input, printed on one line.

    `where` names the file and key, `problem` states the given and the allowed values. `nearest` is the
    closest valid value (empty when there is none).
    """

    where: str
    problem: str
    nearest: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        if self.nearest:
            text += f" (nearest valid: {self.nearest})"
        return " ".join(text.split())


class InputError(ValueError):
    """An invalid input; `violations` lists all its mistakes, one line each."""

    def __init__(self, violations: Violation | str | Sequence[Violation]) -> None:
        if isinstance(violations, str):
            violations = Violation("", violations)
        if isinstance(violations, Violation):
            violations = (violations,)
        self.violations: tuple[Violation, ...] = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))

    def __repr__(self) -> str:
        return f"<InputError of {len(self.violations)}: {_beginning(self)}>"


class RunError(RuntimeError):
    """A failure during a run with a valid input."""

    def __repr__(self) -> str:
        return f"<RunError: {_beginning(self)}>"


def _beginning(error: Exception) -> str:
    """Return the first words of a message in one line, short enough for lists of errors and debuggers."""
    return shorten(str(error), 150, placeholder="...")


def nearest(word: str, options: Iterable[str]) -> str:
    """Return the option closest in spelling to `word`, or an empty string when none is close.

    An option that differs in capitals alone is the closest.
    Options with all parts of `word` come first: `llama-3-70b` is nearer to `llama-70b` than `llama-7b`.
    """
    options, parts = list(options), _parts(word)
    if same := [option for option in options if option.lower() == word.lower()]:
        return same[0]
    fuller = [option for option in options if parts <= _parts(option)]
    matches = difflib.get_close_matches(word, fuller or options, n=1, cutoff=0.5)
    return matches[0] if matches else ""


def nearest_divisor(count: int, *wholes: int) -> int:
    """Return the common divisor of the wholes that is closest to a count; of two such, the smaller one."""
    common = gcd(*wholes)
    if count >= common:
        return common
    near = (one for away in range(count) for one in (count - away, count + away) if common % one == 0)
    return next(near)


def _parts(word: str) -> set[str]:
    return set(re.split(r"[-_.\s]+", word))


def require_choice(where: str, word: str, options: Iterable[str]) -> None:
    """Refuse `word` unless it is one of `options`.

    Raises:
        InputError: with all options and the option nearest in spelling.
    """
    known = sorted(options)
    if word not in known:
        allowed = ", ".join(known)
        raise InputError(Violation(where, f"{word!r} is not one of {allowed}", nearest(word, known)))
