"""A run that was lost with its directory, brought back from the storage of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from weft.describe.run_file import RUN_ID
from weft.errors import InputError, Violation
from weft.training.checkpoint.remote_storage import RemoteStorage
from weft.training.directory.run_directory import RESUMED_FILES, RunDirectory


def bring_run(url: str, runs: Path) -> Path:
    """Return the run directory in `runs` of a run behind a URL; bring its files if it is not there.

    A start then brings the newest checkpoint.

    Raises:
        InputError: if there is no run, or the directory holds another one.
        RunError: if the storage fails.
    """
    storage = RemoteStorage(url)
    name = storage.url.rpartition("/")[2].rpartition("-")[0]
    if not name or not storage.has(RUN_ID):
        raise InputError(Violation(url, f"no run: it has no {RUN_ID}", "s3://bucket/runs/NAME-1f3a90c2"))
    directory = RunDirectory(runs / name)
    if directory.path.exists():
        held = directory.path / RUN_ID
        if not held.exists() or not storage.url.endswith(f"-{held.read_text(encoding='utf-8')[:8]}"):
            problem = "holds another run than the storage; work in another folder, or rename it"
            raise InputError(Violation(str(directory.path), problem))
        return directory.path
    for file in RESUMED_FILES:
        if storage.has(file):
            storage.get(file, directory.path / file)
    storage.bring_history(directory.path)
    return directory.path
