"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file's name to an `OSError` without one, such as the error of writing to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; replace `path` with it when the block succeeds.

    Readers see the old file or the whole new file, never a part, also after a kill.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with naming(path):
            yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line of JSON to a file; first end a line that a kill left unfinished."""
    with naming(path), open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            torn = file.read(1) != b"\n"
        else:
            torn = False
        file.write((b"\n" if torn else b"") + json.dumps(record).encode() + b"\n")


def records_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of lines of JSON; pass over one that a kill has torn, or that is another hand's."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


@contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; rename it to `path` when the block succeeds.

    All its files are flushed to the disk before the rename. So a folder with this name is whole even after a
    loss of power. Remains of a killed process with the same path are removed.

    Raises:
        OSError: when `path` exists already.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for entry in [*unfinished.rglob("*"), unfinished]:
            flush(entry)
        # Not `replace`: a folder that appeared meanwhile is an error, unless it is empty.
        unfinished.rename(path)
        flush(path.absolute().parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk.

    Raises:
        OSError: when the content of a file cannot be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems cannot flush a directory; their rename is still atomic.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def weft_home() -> Path:
    """Return ``$WEFT_HOME``, else ``weft`` in the user's configuration folder; it need not exist yet."""
    given = os.environ.get("WEFT_HOME")
    if given:
        return Path(given).expanduser()
    # The XDG base directory specification ignores relative paths.
    configuration = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (configuration if configuration.is_absolute() else Path.home() / ".config") / "weft"
