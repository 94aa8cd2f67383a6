"""Where a step goes, in words and as a table of a page."""

from __future__ import annotations

from collections.abc import Mapping

from weft.describe.units import format_seconds
from weft.timeline.breakdown import COLLECTIVES, MESSAGES

HEAD = ("cause", "seconds of a mean rank", "of the step")
_WORDS = {COLLECTIVES: "collectives not hidden", MESSAGES: "messages not hidden"}
# What takes less of the step is left out of a line.
_LEAST = 0.001


def breakdown_text(causes: Mapping[str, float]) -> str:
    """One line: the causes that take a thousandth of the step or more, in shares of it."""
    rows = breakdown_rows(causes)
    step_s = sum(causes.values())
    shown = [row for row, seconds in zip(rows, causes.values(), strict=True) if seconds >= _LEAST * step_s]
    return ", ".join(f"{name} {share}" for name, _, share in shown)


def breakdown_rows(causes: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """A row of `HEAD` for each cause."""
    step_s = sum(causes.values())
    return [
        (
            _WORDS.get(name, name.replace("_", " ")),
            format_seconds(seconds),
            f"{seconds / step_s if step_s else 0.0:.1%}",
        )
        for name, seconds in causes.items()
    ]
