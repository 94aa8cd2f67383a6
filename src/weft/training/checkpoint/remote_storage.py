"""`RemoteStorage`: the storage behind a URL that all nodes of a run reach, such as S3. No torch here.

    s3://bucket/runs/NAME-1f3a90c2/
      run.toml run-id plan.json ...          as in the run directory
      metrics.jsonl events.jsonl             as they were at the newest checkpoint
      checkpoints/step-00000100/...

fsspec knows the protocols; some need a further package, such as `s3fs` or `gcsfs`. A checkpoint counts here
once its manifest is there, which comes last.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.errors import InputError, RunError, Violation
from weft.files import replacing, write_whole
from weft.training.checkpoint.manifest import CHECKPOINTS, MANIFEST, generation_path

# What a run directory has beside checkpoints and plans, and what a resume elsewhere goes on from.
HISTORY = ("metrics.jsonl", "events.jsonl")
_STEP = re.compile(rf"step-(\d{{8,}})/{re.escape(MANIFEST)}$")


class RemoteStorage:
    """The folder of one run behind a URL.

    Raises:
        InputError: if nothing here knows the protocol, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        # It takes a tenth of a second, and few runs need it.
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self._files, self._root = url_to_fs(self.url)
        except Exception as error:
            raise InputError(Violation("checkpoint.directory", f"{url}: {_reason(error)}")) from None

    def require_reachable(self) -> None:
        """Refuse storage that cannot be listed; write nothing.

        Raises:
            InputError: with the storage's own reason.
        """
        try:
            self._files.ls(self._root)
        except FileNotFoundError:
            return  # a run makes its folder
        except Exception as error:
            raise InputError(Violation("checkpoint.directory", f"{self.url}: {_reason(error)}")) from None

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that have their manifest, newest first."""
        with self._naming(CHECKPOINTS):
            self._files.invalidate_cache()
            found = self._files.glob(f"{self._root}/{CHECKPOINTS}/step-*/{MANIFEST}")
        return sorted((int(match[1]) for path in found if (match := _STEP.search(path))), reverse=True)

    def put(self, path: Path, where: str, progress: Callable[[], None] = lambda: None) -> None:
        """Copy a file to its place here."""
        with self._naming(where):
            self._files.makedirs(f"{self._root}/{where}".rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), f"{self._root}/{where}", callback=_told(progress))

    def get(self, where: str, path: Path, progress: Callable[[], None] = lambda: None) -> None:
        """Copy a file to `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._naming(where), replacing(path) as unfinished:
            self._files.get_file(f"{self._root}/{where}", str(unfinished), callback=_told(progress))

    def bring_history(self, run_dir: Path) -> None:
        """Bring the records of the newest checkpoint, unless those of a run directory go on from them.

        Records are only appended. So those of a node that had no part in later steps are no continuation.
        """
        for name in HISTORY:
            if self.has(name):
                with tempfile.TemporaryDirectory() as folder:
                    self.get(name, Path(folder) / name)
                    kept = (Path(folder) / name).read_bytes()
                path = run_dir / name
                # A copy may end within a line.
                whole = kept[: kept.rfind(b"\n") + 1]
                if not path.exists() or not path.read_bytes().startswith(whole):
                    write_whole(path, whole.decode())

    def has(self, where: str) -> bool:
        with self._naming(where):
            return bool(self._files.exists(f"{self._root}/{where}"))

    def forget(self, step: int) -> None:
        """Remove a checkpoint, its manifest first."""
        self._remove(place_of(step, MANIFEST))
        self._remove(place_of(step))

    def _remove(self, where: str) -> None:
        with self._naming(where):
            if self._files.exists(f"{self._root}/{where}"):
                self._files.rm(f"{self._root}/{where}", recursive=True)

    @contextmanager
    def _naming(self, where: str) -> Iterator[None]:
        """Raise what a storage raises, which may be anything, as one line with the URL."""
        try:
            yield
        except Exception as error:
            raise RunError(f"{self.url}/{where}: {_reason(error)}") from error


def place_of(step: int, name: str = "") -> str:
    """Return where a checkpoint, or a file of it, is in a run directory and in a storage."""
    return (generation_path(Path(CHECKPOINTS), step) / name).as_posix()


def _told(progress: Callable[[], None]) -> Any:
    from fsspec.callbacks import Callback

    class Told(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            progress()

    return Told()


def _reason(error: Exception) -> str:
    """Return one line; some storages tell all that they tried."""
    told = str(error).strip()
    kind = "" if isinstance(error, (ImportError, ValueError)) and told else f"{type(error).__name__}: "
    return f"{kind}{told}".splitlines()[0]
