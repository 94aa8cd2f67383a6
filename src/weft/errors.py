"""Errors written for people: what was given, what is allowed, the nearest valid choice.

`InputError` means the input was refused (exit code 2); `RunError` means a run failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import shorten


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with an input, printed on one line.

    `where` names the file and key, `problem` says what was given and what is allowed, `nearest` is the
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
    """The input was refused; `violations` lists everything that is wrong with it, one line each."""

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
    """A run that had been accepted failed while it ran."""

    def __repr__(self) -> str:
        return f"<RunError: {_beginning(self)}>"


def _beginning(error: Exception) -> str:
    """Return the first words of a message, in one line: what lists of errors and debuggers have room for."""
    return shorten(str(error), 150, placeholder="...")


def nearest(word: str, options: Iterable[str]) -> str:
    """Return the option closest in spelling to `word`, or an empty string when none is close."""
    matches = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return matches[0] if matches else ""


def require_choice(where: str, word: str, options: Iterable[str]) -> None:
    """Refuse `word` unless it is one of `options`.

    Raises:
        InputError: naming the options and the one nearest in spelling.
    """
    known = sorted(options)
    if word not in known:
        allowed = ", ".join(known)
        raise InputError(Violation(where, f"{word!r} is not one of {allowed}", nearest(word, known)))
