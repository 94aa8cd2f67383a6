"""Stated mutations of the source: small wrong changes, each with the tests that must fail of it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class StaleError(Exception):
    """The source no longer has the piece, or has it several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One wrong change.

    Attributes:
        room: the file of mutations that states it.
        breaks: what is wrong then, in one line.
        file: whose text is changed, from the root of the tree.
        piece: what that file has exactly once.
        replacement: what stands there instead.
        tests: files of tests, of which one must fail.
    """

    room: str
    breaks: str
    file: str
    piece: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the change.

        Raises:
            StaleError: when there is not exactly one such piece.
        """
        found = text.count(self.piece)
        if found != 1:
            raise StaleError(f"{self.room}: {self.breaks}: {self.file} has the piece {found} times")
        return text.replace(self.piece, self.replacement)


def rooms() -> tuple[str, ...]:
    """The names of all files of mutations."""
    return tuple(sorted(path.stem for path in HERE.glob("*.toml")))


def mutations(chosen: Sequence[str]) -> list[Mutation]:
    """All mutations of these rooms, in the order in which they stand there."""
    found = []
    for room in chosen:
        tables = tomllib.loads((HERE / f"{room}.toml").read_text(encoding="utf-8"))["mutation"]
        found += [Mutation(room=room, **{**one, "tests": tuple(one["tests"])}) for one in tables]
    return found
