"""A cache of prepared data on disk: one rename of a complete directory puts an entry under its key.

Any number of processes may build an entry at once; the later ones discard their own copies.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CONTENTS = "contents.json"

# It writes the files of an entry into the given folder and returns their description.
Builder = Callable[[Path], Mapping[str, Any]]


def cached(entry: Path, build: Builder) -> dict[str, Any]:
    """Return the record of an entry's `build`, from now, from another process or from an earlier run.

    An entry with files of other sizes than written is built again. After an error in `build` no files stay.
    """
    if not is_complete(entry):
        _publish(entry, build)
    contents: dict[str, Any] = _contents(entry)["record"]
    return contents


def is_complete(entry: Path) -> bool:
    """Return True if the entry's folder and all its files exist, at their full size."""
    try:
        sizes = _contents(entry)["sizes"]
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(entry: Path, build: Builder) -> None:
    """Build the entry in a temporary directory and rename it when it is complete."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        record = dict(build(building))
        sizes = {file.name: file.stat().st_size for file in building.iterdir()}
        (building / CONTENTS).write_text(json.dumps({"record": record, "sizes": sizes}))
        while not is_complete(entry):
            try:
                building.rename(entry)
            except OSError:
                if not is_complete(entry):
                    _set_aside(entry, building)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _set_aside(entry: Path, building: Path) -> None:
    """Move a damaged entry out of the way; another process may be quicker."""
    aside = building.with_name(building.name + ".damaged")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside)


def _contents(entry: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((entry / CONTENTS).read_text())
    return contents
