"""The additions of other installed packages to weft, through entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from weft.errors import InputError, Violation


class Installed(NamedTuple):
    """The name of an entry point and the loaded object."""

    name: str
    loaded: Any


@cache
def installed(group: str) -> tuple[Installed, ...]:
    """Load the objects of all entry points in a group; packages are searched once.

    Raises:
        InputError: when an entry point's object cannot be imported.
    """
    found = []
    for entry in entry_points(group=group):
        try:
            found.append(Installed(entry.name, entry.load()))
        except (ImportError, AttributeError) as error:
            where, problem = f"entry point {group}", f"{entry.name} = {entry.value!r}: {error}"
            raise InputError(Violation(where, problem)) from error
    return tuple(found)


def remedy(extra: str) -> str:
    """Return the command that installs one of weft's extras; weft is on no index under its name."""
    return f'pip install ".[{extra}]" in the folder of weft'
