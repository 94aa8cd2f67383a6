"""What other installed packages add to weft, through entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from weft.errors import InputError, Violation


class Installed(NamedTuple):
    """What an entry point names, and what that is."""

    name: str
    loaded: Any


@cache
def installed(group: str) -> tuple[Installed, ...]:
    """Return all that entry points of a group name; packages are looked for once.

    Raises:
        InputError: when what one of them names cannot be imported.
    """
    found = []
    for entry in entry_points(group=group):
        try:
            found.append(Installed(entry.name, entry.load()))
        except (ImportError, AttributeError) as error:
            where, problem = f"entry point {group}", f"{entry.name} = {entry.value!r}: {error}"
            raise InputError(Violation(where, problem)) from error
    return tuple(found)
