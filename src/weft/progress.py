"""Progress of long work: the work counts its finished parts, and another function or process shows them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from weft.files import write_whole

# No reader polls a file more often.
WRITE_EVERY_S = 0.2

Part = TypeVar("Part")


class WorkDone(NamedTuple):
    """The finished parts of a piece of work, and all its parts, in its unit."""

    work: str
    done: int
    total: int
    unit: str


ProgressReport = Callable[[WorkDone], None]


def unwatched(_: WorkDone) -> None:
    """Show nothing: nobody waits for the work."""


class CountedWork:
    """A piece of work that counts its finished parts, and reports its start and every change."""

    def __init__(self, report: ProgressReport, work: str, total: int, unit: str) -> None:
        self._report = report
        self._newest = WorkDone(work, 0, total, unit)
        report(self._newest)

    def finish(self, parts: int = 1) -> None:
        """Count further parts as finished; work that is repeated counts up to the total only."""
        done = min(self._newest.total, self._newest.done + parts)
        self._newest = self._newest._replace(done=done)
        self._report(self._newest)

    def each(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield parts; each is finished when the next one is asked for."""
        for part in parts:
            yield part
            self.finish()


class ProgressFile:
    """A file by which one process tells another of its progress; neither waits for the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: tuple[str, float] = ("", 0.0)

    def write(self, done: WorkDone) -> None:
        """Replace the file's content; leave out progress that no reader would see, but no start or end."""
        work, written_s = self._written
        now_s = time.monotonic()
        if done.work == work and now_s - written_s < WRITE_EVERY_S and done.done < done.total:
            return
        self._written = (done.work, now_s)
        # A full disk ends the work only where the work itself writes.
        with suppress(OSError):
            write_whole(self._path, json.dumps(done) + "\n")

    @contextmanager
    def polled(self, report: ProgressReport) -> Iterator[Callable[[], None]]:
        """Yield a function that reports the newest progress; at the end, report the last and remove it."""
        # A killed process has left its own.
        self._path.unlink(missing_ok=True)
        try:
            yield lambda: self._pass_on(report)
            self._pass_on(report)
        finally:
            self._path.unlink(missing_ok=True)

    def _pass_on(self, report: ProgressReport) -> None:
        with suppress(FileNotFoundError):
            report(WorkDone(*json.loads(self._path.read_text(encoding="utf-8"))))


def progress_file(directory: Path) -> ProgressFile:
    """Return the file of the workers of a run directory, or of a folder of measurements."""
    return ProgressFile(directory / "progress.json")
