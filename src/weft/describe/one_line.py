"""How objects show themselves to people: one line, the class first, never longer than a terminal or two."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass

LONGEST = 200
_VALUES = reprlib.Repr()
_VALUES.maxtuple = _VALUES.maxlist = _VALUES.maxdict = 4
_VALUES.maxlevel, _VALUES.maxstring, _VALUES.maxother = 2, 60, 60


def one_line(thing: object, words: str = "") -> str:
    """The class of a thing and what is worth knowing of it: `words`, or its fields, long ones cut short."""
    name = type(thing).__name__
    return _cut(f"<{name} {words}", ">") if words else _cut(f"{name}({_fields(thing)}", ")")


def _fields(thing: object) -> str:
    """Enough of them to fill the line; a field may hold more than anybody wants to see printed."""
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
