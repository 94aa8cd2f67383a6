"""A run directory that is read again and again: each look reads only the lines that it has gained."""

from __future__ import annotations

import math
import os
import tomllib
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.describe.plan_file import PlanFile, load_plan_file
from weft.errors import InputError
from weft.files import records_in
from weft.training.directory.run_directory import held_out_record

# The first of these that a step has; earlier versions of weft recorded the whole process only.
_MEMORY = ("max_device_bytes", "tensor_bytes", "max_rss_bytes")
_Content = TypeVar("_Content")


class LineFile:
    """A file of JSON lines that another process appends to.

    Attributes:
        identity: a hash of its first line, with the time of it; another one means another file.
    """

    def __init__(self, path: Path) -> None:
        self.identity = 0
        self._path = path
        self._read_bytes = 0

    def look(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file is another one than before, and the records of its new whole lines."""
        try:
            with open(self._path, "rb") as file:
                first, size = file.readline(), os.fstat(file.fileno()).st_size
                identity = zlib.crc32(first) if first.endswith(b"\n") else 0
                other = identity != self.identity or size < self._read_bytes
                if other:
                    self.identity, self._read_bytes = identity, 0
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return False, []
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return other, list(records_in(whole.splitlines()))


class StepFigures(NamedTuple):
    """The figures of one finished step; NaN where the run does not record them.

    Attributes:
        line: its place among all lines of the file.
        memory_bytes: rank 0's peak so far of tensors, on its accelerator if it has one.
        time_s: when the step ended, in seconds since 1970.
    """

    line: int
    step: int
    loss: float
    step_s: float
    tokens_per_s: float
    memory_bytes: float
    time_s: float


@dataclass(slots=True)
class _ParsedFile:
    """A parsed file, and the state of the file on its disk when it was read."""

    state: tuple[int, int, int]
    content: Any


class LiveRun:
    """The steps, events and plan of a run directory, as far as the last `look` has read them.

    Attributes:
        lines: number of all read lines with figures.
        steps: ascending; after a resume the repeated steps replace those of the former start.
        events: in the order of the file.

    Both lists begin anew when another file takes the place of theirs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self.steps: list[StepFigures] = []
        self.events: list[dict[str, Any]] = []
        self._metrics, self._told = LineFile(path / "metrics.jsonl"), LineFile(path / "events.jsonl")
        self._files: dict[str, _ParsedFile] = {}

    def look(self) -> None:
        """Read the lines that the run has written since the last look."""
        replaced, rows = self._metrics.look()
        if replaced:
            self.lines, self.steps = 0, []
        for row in rows:
            self._add(row)
        replaced, events = self._told.look()
        if replaced:
            self.events = []
        self.events += events

    def _add(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row.get("step"), int) or "loss" not in row:
            return
        while self.steps and self.steps[-1].step >= row["step"]:
            self.steps.pop()
        self.steps.append(
            StepFigures(
                line=self.lines,
                step=row["step"],
                loss=_figure(row, "loss"),
                step_s=_figure(row, "step_s"),
                tokens_per_s=_figure(row, "tokens_per_s"),
                memory_bytes=_figure(row, next((name for name in _MEMORY if name in row), "")),
                time_s=float(row.get("time_s", 0.0)),
            )
        )
        self.lines += 1

    def steps_after(self, lines: int) -> list[StepFigures]:
        """Return the steps that stand behind so many lines of the file."""
        return self.steps[bisect_left(self.steps, lines, key=attrgetter("line")) :]

    @property
    def identity(self) -> tuple[int, int]:
        """The hashes by which a viewer that comes back knows the files."""
        return self._metrics.identity, self._told.identity

    def held_out_after(self, events: int) -> list[tuple[int, float]]:
        """Return the evaluations after so many events: (steps trained before, nats per target), ascending.

        The last one of a step wins.
        """
        records = (held_out_record(event) for event in self.events[events:])
        found = {int(one["step"]): one["held_out_loss"] for one in records if one is not None}
        return sorted(found.items())

    @property
    def file(self) -> PlanFile:
        """The plan file; another plan may have taken over since the last look.

        Raises:
            InputError: if it cannot be read.
        """
        return self._parsed("plan.json", load_plan_file)

    @property
    def steps_in_all(self) -> int:
        """The number of steps in the run file.

        Raises:
            InputError: if it cannot be read.
        """
        return self._parsed("run.toml", _steps_in)

    def _parsed(self, name: str, parse: Callable[[Path], _Content]) -> _Content:
        path = self.path / name
        try:
            about = path.stat()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        state = (about.st_ino, about.st_size, about.st_mtime_ns)
        kept = self._files.get(name)
        if kept is None or kept.state != state:
            kept = self._files[name] = _ParsedFile(state, parse(path))
        content: _Content = kept.content
        return content


def _figure(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _steps_in(path: Path) -> int:
    try:
        return int(tomllib.loads(path.read_text(encoding="utf-8"))["train"]["steps"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: no steps can be read from it: {error}") from None
