"""`Contract`: the properties of the training that a method preserves."""

from __future__ import annotations

from enum import IntEnum


class Contract(IntEnum):
    """The properties that a method preserves, strictest first; `contract = X` admits X and stricter ones."""

    EXACT = 0
    FUNCTION_PRESERVING = 1
    UNBIASED = 2
    EMPIRICAL = 3

    @property
    def word(self) -> str:
        """The contract's word in run files and tables."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, word: str) -> Contract:
        """Return the contract of a run file's word."""
        return cls[word.upper().replace("-", "_")]
