"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors in the block name this file where they name none: writing to a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of `path` when the block ends well.

    A reader, and whoever comes after a kill, sees the old file or the whole new one, never a part.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with naming(path):
            yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line of JSON to a file, and first end a line that a kill has torn."""
    with naming(path), open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            torn = file.read(1) != b"\n"
        else:
            torn = False
        file.write((b"\n" if torn else b"") + json.dumps(record).encode() + b"\n")


@contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write to, which becomes `path` when the block ends well.

    Everything in it is on the disk before it gets its name, so that a folder of that name is whole even after
    a loss of power. What a killed process of the same path left is removed.

    Raises:
        OSError: when something is there already.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for entry in [*unfinished.rglob("*"), unfinished]:
            flush(entry)
        # Not `replace`: a folder that came to be meanwhile is an error, unless it is empty.
        unfinished.rename(path)
        flush(path.absolute().parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def flush(path: Path) -> None:
    """Bring a file's content, or the names in a folder, to the disk.

    Raises:
        OSError: when the content of a file does not get there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems cannot flush a directory; the rename is atomic there all the same.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
