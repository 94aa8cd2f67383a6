"""Where text comes from: Python's own standard library, a file, a folder or a glob.

`python-stdlib` is text that every machine with Python has: the sources of the standard library, some 31 MB,
without installed packages.
"""

from __future__ import annotations

import glob
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, Violation, nearest

PYTHON_STDLIB = "python-stdlib"
_INSTALLED = {"site-packages", "dist-packages"}
_ALLOWED = f"{PYTHON_STDLIB}, a file, a folder or a glob"


@dataclass(frozen=True, slots=True)
class Document:
    """A file as it was listed; `name` is its path relative to the source, with forward slashes."""

    name: str
    path: Path
    size: int
    modified_ns: int


def list_documents(source: str) -> list[Document]:
    """The non-empty files of `source`, sorted by name.

    A folder means every file below it whose path has no part that starts with a dot.

    Raises:
        InputError: when the source does not exist or holds no text.
    """
    root, paths = _paths(source)
    documents = sorted(_documents(root, paths), key=lambda document: document.name)
    if not documents:
        raise InputError(Violation("task.data", f"{source!r} holds no text; allowed: {_ALLOWED}"))
    return documents


def _paths(source: str) -> tuple[Path, Iterable[Path]]:
    """The folder that names are relative to, and the files."""
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = (path for path in root.rglob("*.py") if not _INSTALLED.intersection(path.parts))
        return root, found
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path, (found for found in path.rglob("*") if not _is_hidden(found.relative_to(path)))
    if path.is_file():
        return path.parent, (path,)
    if glob.has_magic(source):
        return _glob_root(path), (Path(found) for found in glob.iglob(str(path), recursive=True))
    raise InputError(Violation("task.data", f"{source!r} does not exist; allowed: {_ALLOWED}", _near(source)))


def _documents(root: Path, paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # a dangling link, or a file removed since it was listed
        if stat.S_ISREG(status.st_mode) and status.st_size:
            name = path.relative_to(root).as_posix()
            yield Document(name, path.absolute(), status.st_size, status.st_mtime_ns)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _glob_root(pattern: Path) -> Path:
    """The longest leading part of a pattern that has nothing to match."""
    root = pattern
    while glob.has_magic(str(root)):
        root = root.parent
    return root


def _near(source: str) -> str:
    """The name closest to a missing one: a word weft knows or a neighbour in its folder."""
    if near := nearest(source, [PYTHON_STDLIB]):
        return near
    path = Path(source).expanduser()
    try:
        neighbours = {entry.name: str(entry) for entry in path.parent.iterdir()}
    except OSError:
        return ""
    return neighbours.get(nearest(path.name, neighbours), "")
