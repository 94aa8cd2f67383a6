"""Manifests of checkpoints, and the search for the newest whole checkpoint of a run. No torch here.

A manifest holds the size and the SHA-256 of every other file of a checkpoint. The check reads every byte.
It accepts a manifest only in its canonical form. So it finds a changed byte in any file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import RunError

FORMAT = 2
MANIFEST = "manifest.json"
# The folder of checkpoints in a run directory, or a link to it.
CHECKPOINTS = "checkpoints"
_GENERATION = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 22


def generation_path(directory: Path, step: int) -> Path:
    """Return the final path of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def generations(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all checkpoints under their final names, newest first."""
    if not directory.is_dir():
        return []
    found = [(_GENERATION.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def untold(read_bytes: int = 0) -> None:
    """Note no progress: nobody waits for the caller."""


def newest_complete(
    directory: Path, progress: Callable[[int], None] = untold
) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint, None if there are none, and one line per newer one skipped.

    It only reads and needs no process group. It calls `progress` after each read, with its bytes.

    Raises:
        RunError: if there are checkpoints and none is whole.
    """
    skipped: list[str] = []
    for _, path in generations(directory):
        try:
            verify(path, progress)
        except (RunError, OSError) as error:
            skipped.append(str(error))
            continue
        return path, skipped
    if skipped:
        raise RunError(f"no checkpoint can be resumed: {'; '.join(skipped)}")
    return None, []


def verify(path: Path, progress: Callable[[int], None] = untold) -> None:
    """Check a checkpoint's files against its manifest.

    Raises:
        RunError: in one line, for the first problem.
    """
    expected, present = read_manifest(path), _present(path)
    if present != set(expected):
        missing, unknown = sorted(set(expected) - present), sorted(present - set(expected))
        raise RunError(
            f"{path}: files missing: {missing or 'none'}, not in the manifest: {unknown or 'none'}"
        )
    _verify_files(path, expected, progress)


def verify_part(
    path: Path, progress: Callable[[int], None] = untold
) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """Check those files of a checkpoint that its folder has; return their names, and the manifest.

    Raises:
        RunError: as `verify`.
    """
    expected, present = read_manifest(path), _present(path)
    if unknown := sorted(present - set(expected)):
        raise RunError(f"{path}: files not in the manifest: {unknown}")
    _verify_files(path, {name: expected[name] for name in present}, progress)
    return sorted(present), expected


def _present(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()} - {MANIFEST}


def _verify_files(
    path: Path, expected: Mapping[str, tuple[int, str]], progress: Callable[[int], None]
) -> None:
    for name, (size, digest) in sorted(expected.items()):
        if (path / name).stat().st_size != size:
            raise RunError(f"{path / name}: {(path / name).stat().st_size} bytes; the manifest says {size}")
        if digest_of(path / name, progress) != digest:
            raise RunError(f"{path / name}: damaged: its SHA-256 is not the manifest's")


def manifest(files: Mapping[str, tuple[int, str]]) -> bytes:
    """Return the content of a manifest from (size, digest) by file name."""
    return canonical({"format": FORMAT, "files": files})


def canonical(record: Mapping[str, Any]) -> bytes:
    """Return a record's canonical JSON bytes."""
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def digest_of(path: Path, progress: Callable[[int], None] = untold) -> str:
    """Return a file's SHA-256 in hex; call `progress` after each read, with its bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while content := file.read(_READ_BYTES):
            digest.update(content)
            progress(len(content))
    return digest.hexdigest()


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return (size, digest) by file name; refuse bytes that `manifest` itself would not write.

    Raises:
        RunError: if there is none, or it is damaged or of another format.
    """
    try:
        content = (path / MANIFEST).read_bytes()
        record = json.loads(content)
        if canonical(record) != content:
            raise ValueError
        if record["format"] != FORMAT:
            raise RunError(f"{path / MANIFEST}: of format {record['format']}; this weft reads {FORMAT}")
        return {str(name): (int(size), str(digest)) for name, (size, digest) in record["files"].items()}
    except OSError:
        raise RunError(f"{path}: torn: it has no {MANIFEST}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{path / MANIFEST}: damaged") from None
