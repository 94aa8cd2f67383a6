"""`Contract`: what a method keeps of the training that it is a part of."""

from __future__ import annotations

from enum import IntEnum


class Contract(IntEnum):
    """What a method keeps, strictest first; a goal of `contract = X` admits X and everything stricter."""

    EXACT = 0
    FUNCTION_PRESERVING = 1
    UNBIASED = 2
    EMPIRICAL = 3

    @property
    def word(self) -> str:
        """As run files and tables say it."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, word: str) -> Contract:
        """Return the contract that a run file names."""
        return cls[word.upper().replace("-", "_")]
