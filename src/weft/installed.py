"""The additions of other installed packages to weft, through entry points."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.errors import InputError, Violation

# Code of weft, of Python and of installed packages, where no user looks for a mistake.
_LIBRARIES = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(one) for one in ("stdlib", "purelib", "platlib")),
)

_IMPORTING = ContextVar("importing", default="")

Made = TypeVar("Made")


class Installed(NamedTuple):
    """The name of an entry point and the loaded object."""

    name: str
    loaded: Any


@cache
def entry_points_of_all() -> Any:
    """Return the entry points of all packages, read once: a search opens a file of each package.

    Their type is `SelectableGroups` in Python 3.11 and `EntryPoints` later.
    """
    return entry_points()


@cache
def installed(group: str) -> tuple[Installed, ...]:
    """Load the objects of all entry points in a group; packages are searched once.

    Raises:
        InputError: when an entry point's object cannot be imported.
    """
    found = []
    for entry in entry_points_of_all().select(group=group):
        try:
            found.append(Installed(entry.name, entry.load()))
        except Exception as error:
            where, problem = f"entry point {group}", f"{entry.name} = {entry.value!r}: {failure(error)}"
            raise InputError(Violation(where, problem)) from error
    return tuple(found)


def installed_names(group: str) -> tuple[str, ...]:
    """Return the names of all entry points in a group; nothing is imported."""
    return tuple(sorted({entry.name for entry in entry_points_of_all().select(group=group)}))


def with_installed(
    kind: str, own: Mapping[str, Made], members: Sequence[str], checked: Callable[[Any], Made]
) -> dict[str, Made]:
    """Return weft's own objects of a kind by name, then those of the classes in the group `weft.KINDs`.

    Args:
        members: that each of these objects has, `name` among them.
        checked: makes a known object of one that has them.

    Raises:
        InputError: when two share a name, or an installed one lacks a member.
    """
    table = dict(own)
    for entry, named in installed(f"weft.{kind}s"):
        made = named()
        if missing := [member for member in members if not hasattr(made, member)]:
            problem = f"{entry!r} is no {kind}: it has no {' and no '.join(missing)}"
            raise InputError(Violation(kind, problem))
        if made.name in table:
            raise InputError(Violation(kind, f"two {kind}s are called {made.name!r}"))
        table[made.name] = checked(made)
    return table


def imported(where: str, name: str) -> Any:
    """Return the object of `package.module:name`, of a user or of another package.

    Args:
        where: the key that names it.

    Raises:
        InputError: when the import fails, with the place in the code.
    """
    token = _IMPORTING.set(name)
    try:
        return EntryPoint(name=name, value=name, group="").load()
    except Exception as error:
        problem = f"{name!r} cannot be imported: {failure(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(":")[0].partition(".")[0]:
            problem += " in this folder or among installed packages"
        raise InputError(Violation(where, problem)) from None
    finally:
        _IMPORTING.reset(token)


def require_no_import(call: str) -> None:
    """Refuse a call by a module that weft is importing: each rank would make it again.

    Raises:
        InputError: with the way to call it from a script.
    """
    if name := _IMPORTING.get():
        problem = f"is called while weft imports {name!r}; call it where only the script itself does"
        raise InputError(Violation(call, problem, 'if __name__ == "__main__":'))


def failure(error: Exception) -> str:
    """Return kind, first line and place of an error that other code than weft's raised."""
    line = _first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    if not own and isinstance(error, ImportError | AttributeError | SyntaxError):
        return line
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {line}{place}"


def failure_of_package(error: Exception) -> str | None:
    """Return in one line how a package that adds to weft has failed; None if none of its code ran.

    The line names the module, and the line of its code that ran last.
    """
    known = entry_points_of_all()
    added = {
        entry.value.partition(":")[0].partition(".")[0]
        for group in known.groups
        if group.startswith("weft.")
        for entry in known.select(group=group)
    }
    walked = traceback.walk_tb(error.__traceback__)
    places = [(str(frame.f_globals.get("__name__")), line) for frame, line in walked]
    own = [(module, line) for module, line in places if module.partition(".")[0] in added - {"weft"}]
    if not own:
        return None
    module, line = own[-1]
    return f"{module}, line {line}, fails: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    (line, *_) = str(error).splitlines() or ["no reason given"]
    return line


def is_library(file: str) -> bool:
    """Return True for a file of weft, of Python or of an installed package."""
    return file.startswith((*_LIBRARIES, "<"))


def remedy(extra: str) -> str:
    """Return the command that installs one of weft's extras; weft is on no index under its name."""
    return f'pip install ".[{extra}]" in the folder of weft'
