"""Reading a schedule's options."""

from __future__ import annotations

from weft.program.schedules.base import Options


def refuse_count(name: str, option: str, options: Options) -> str | None:
    """Why this option is not a whole number of at least 1, or None; an absent one is fine."""
    value = options.get(option, 1)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    return f"{name}'s {option} is {value!r}; a whole number of at least 1 is allowed"


def count_option(option: str, options: Options, default: int) -> int:
    """The value of an option that `refuse_count` accepts."""
    return int(options.get(option, default))
