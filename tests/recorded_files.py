"""What the disk is told, in order: which files are flushed, renamed and removed, and how long they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Told:
    """One call: `flush` of a path that had so many bytes, `name` for a rename to it, `remove` of a folder."""

    what: str
    path: str
    size: int = 0


@contextmanager
def recorded() -> Iterator[list[Told]]:
    """Record this process's calls, and make them all the same."""
    told: list[Told] = []
    fsync, rename, replace, rmdir = os.fsync, os.rename, os.replace, os.rmdir

    def flushing(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        told.append(Told("flush", path, os.fstat(number).st_size))
        fsync(descriptor)

    def naming(call: Any) -> Any:
        def named(source: Any, target: Any, **options: Any) -> None:
            call(source, target, **options)
            told.append(Told("name", os.path.realpath(target)))

        return named

    def removing(path: Any, **options: Any) -> None:
        rmdir(path, **options)
        told.append(Told("remove", os.path.realpath(path)))

    with (
        patch.object(os, "fsync", flushing),
        patch.object(os, "rename", naming(rename)),
        patch.object(os, "replace", naming(replace)),
        patch.object(os, "rmdir", removing),
    ):
        yield told


def require_flushed_before_named(told: list[Told], built: Path, final: Path) -> None:
    """All of `final` was on the disk when it got its name, and then its name was.

    Its content was flushed under the name `built`; of a folder every file, whole, and every folder after
    what is in it.
    """
    named = told.index(Told("name", str(final)))
    entries = [final, *final.rglob("*")]
    assert len(entries) > 1
    for entry in entries:
        before = str(built / entry.relative_to(final))
        flushes = [one for one in told[:named] if (one.what, one.path) == ("flush", before)]
        assert flushes, f"{entry.name} was not flushed before its folder got its name"
        sizes = {one.size for one in flushes}
        if entry.is_file():
            assert entry.stat().st_size in sizes, f"{entry.name} was flushed before it was whole: {sizes}"
    flushed = [one.path for one in told if one.what == "flush"]
    last = max(place for place, path in enumerate(flushed) if path.startswith(f"{built}/"))
    assert str(built) in flushed[last:], "the folder was flushed before the last of its files"
    after = [one.path for one in told[named:] if one.what == "flush"]
    assert str(final.parent) in after, "the new name was not flushed"
