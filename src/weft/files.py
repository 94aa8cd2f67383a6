"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of `path` when the block ends well.

    A reader, and whoever comes after a kill, sees the old file or the whole new one, never a part.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
