"""Common types and text of the tables of RUN.toml and CLUSTER.toml."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from weft.describe.one_line import one_line

Scalar = str | int | float | bool
Value = Scalar | Sequence[Scalar] | Mapping[str, Scalar]


def table_text(header: str, values: Mapping[str, Value]) -> str:
    """Return a table's text: its header (``[train]``, ``[[node]]`` or empty) and one line per key."""
    lines = [header] if header else []
    lines += [f"{key_text(key)} = {value_text(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def value_text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string_text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key_text(key)} = {value_text(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(value_text(item) for item in value)}]"
    # repr of a float is the shortest text with the exact value.
    return repr(value)


def key_text(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _string_text(key)


def _string_text(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also escapes DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Products of steps, samples and tokens must remain 64-bit integers.
Count = Annotated[int, Field(ge=1, le=10**9)]
Word = Annotated[str, Field(min_length=1)]
# TOML has no tuples; values inside them are still checked strictly.
TOML_ARRAY = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
IMPORTABLE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"


class TomlTable(BaseModel):
    """A table that refuses unknown keys, values of another type, and infinite and undefined numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __repr__(self) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return repr(self)


def is_importable(name: str) -> bool:
    """Return True if a name has the form `package.module:function`."""
    return re.fullmatch(IMPORTABLE, name) is not None
