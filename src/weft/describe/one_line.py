"""Short texts of objects for people: the class first, at most `LONGEST` characters in one line."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass

LONGEST = 200
_VALUES = reprlib.Repr()
_VALUES.maxtuple = _VALUES.maxlist = _VALUES.maxdict = 4
_VALUES.maxlevel, _VALUES.maxstring, _VALUES.maxother = 2, 60, 60


def one_line(thing: object, words: str = "") -> str:
    """Return the class of a thing with `words`, or with its fields; long texts are truncated."""
    name = type(thing).__name__
    return _cut(f"<{name} {words}", ">") if words else _cut(f"{name}({_fields(thing)}", ")")


def _fields(thing: object) -> str:
    """Return the text of enough fields to fill the line; long values are truncated."""
    names = [one.name for one in fields(thing)] if is_dataclass(thing) else list(vars(thing))
    shown, length = [], 0
    for name in names:
        if length > LONGEST:
            break
        shown.append(f"{name}={_VALUES.repr(getattr(thing, name))}")
        length += len(shown[-1])
    return ", ".join(shown)


def _cut(text: str, end: str) -> str:
    text = " ".join(text.split())
    return text + end if len(text) + len(end) <= LONGEST else f"{text[: LONGEST - 3 - len(end)]}...{end}"
