"""Writing TOML: the few shapes that weft's own files need, in one canonical form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Scalar = str | int | float | bool
Value = Scalar | Sequence[Scalar] | Mapping[str, Scalar]


def table_text(header: str, values: Mapping[str, Value]) -> str:
    """A table: its header (``[train]``, ``[[node]]`` or empty) and one line per key."""
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
    # repr of a float is the shortest text that reads back exactly.
    return repr(value)


def key_text(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _string_text(key)


def _string_text(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also escapes DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
