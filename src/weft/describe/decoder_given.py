"""`Given`: the keys of one `config.json`, with the defaults of its row, and the mistakes found in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.decoder_row import Fact
from weft.describe.units import shown
from weft.errors import Violation


class Given:
    """The values of keys; each reading notes its mistakes in `problems`.

    A key `a.b` is `b` in an object `a`.
    """

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where
        self.problems: list[Violation] = []

    def note(self, key: str, problem: str, nearest: str = "") -> None:
        self.problems.append(Violation(f"{self.where}: {key}", problem, nearest))

    def value(self, key: str) -> Any:
        """Return the value of a key; None if it is absent or null."""
        found: Any = self.record
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def fact(self, fact: Fact) -> bool:
        return bool(self.record.get(fact, False)) if isinstance(fact, str) else fact

    def count(self, *keys: str, least: int = 1) -> int:
        """Return the integer of the first present key; note a violation if there is none of `least`."""
        key = next((key for key in keys if self.value(key) is not None), keys[0])
        value = self.value(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.note(
            key, "missing" if value is None else f"{shown(value)}: must be an integer of at least {least}"
        )
        return least

    def entries(self, key: str, layers: int) -> list[Any] | None:
        """Return a list with an entry for each layer; None if the key is absent or null."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            self.note(key, f"{shown(value)}: must be a list with an entry for each of {layers} layers")
            return None
        return value
