"""Paths of files and folders to write, checked before the work whose results they receive."""

from __future__ import annotations

import tempfile
from pathlib import Path

from weft.errors import InputError, Violation


def require_file(path: Path) -> None:
    """Refuse a path where no file can be written; an existing file may be replaced.

    Raises:
        InputError: with the reason; nothing is left at the path.
    """
    if path.is_dir():
        raise InputError(Violation(str(path), "is a folder; name a file"))
    _require_writable(path, path.absolute().parent)


def require_svg(path: Path) -> None:
    """Refuse a path where no picture in SVG can be written.

    Raises:
        InputError: when the name ends unlike an SVG's, or as `require_file` does.
    """
    if path.suffix.lower() not in ("", ".svg"):
        raise InputError(Violation(str(path), "pictures are SVG", str(path.with_suffix(".svg"))))
    require_file(path)


def require_new(path: Path) -> None:
    """Refuse a path where something exists, or where no file or folder can be made.

    Raises:
        InputError: with the reason; nothing is left at the path.
    """
    if path.exists() or path.is_symlink():
        raise InputError(Violation(str(path), "exists already; give another path"))
    _require_writable(path, path.absolute().parent)


def require_folder(path: Path) -> None:
    """Refuse a path where no folder exists or can be made with its parents, or where it cannot be written.

    Raises:
        InputError: with the reason; nothing is left at the path.
    """
    _require_writable(path, next(one for one in (path, *path.absolute().parents) if one.exists()))


def _require_writable(path: Path, folder: Path) -> None:
    """Refuse `path` unless a file can be made in `folder`; permissions alone do not tell it."""
    if not folder.exists():
        raise InputError(Violation(str(path), f"the folder {folder} does not exist"))
    if not folder.is_dir():
        raise InputError(Violation(str(path), f"{folder} is a file, not a folder"))
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"nothing can be written in the folder {folder}: {error.strerror}"
        raise InputError(Violation(str(path), problem)) from None
