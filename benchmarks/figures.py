"""Figures of benchmarks: what each says, the machine that it was taken on, and the file that keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from weft.describe.units import format_bytes, format_count, format_seconds

PACKAGES = ("weft", "numpy", "numba", "torch")
# A benchmark of several ranks keeps the cores busy itself; more than this is the work of others, too.
BUSY_LOAD_PER_CORE, BUSY_STEAL = 1.5, 0.02
# Tables are made from figures: writing one must not make the figures those of another commit.
MEASURED = (".", ":(exclude)docs")


@dataclass(frozen=True, slots=True)
class Value:
    """What was measured.

    Attributes:
        unit: `s`, `bytes`, `share`, `ratio`, `count`, `nats` or `per s`.
        target: what the figure should keep to; `met` says whether it does, by default if it is at most that.
        low: with `high` the interval of the figure, or the spread of its repeats.
    """

    value: float
    unit: str
    target: float | None = None
    met: bool | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of_repeats(cls, values: Sequence[float], unit: str, target: float | None = None) -> Value:
        """The median of repeats, with their spread."""
        return cls(statistics.median(values), unit, target, low=min(values), high=max(values))

    def judged(self) -> bool | None:
        """Whether the target is met; None without a target and a verdict of its own."""
        if self.met is not None or self.target is None:
            return self.met
        return self.value <= self.target

    def changed(self, change: Callable[[float], float]) -> Value:
        """What an increasing function makes of the figure and its interval."""
        low, high = (None if one is None else change(one) for one in (self.low, self.high))
        return replace(self, value=change(self.value), low=low, high=high)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a benchmark; `name` is that of its cell, or `CELL: WHAT` of a cell with several."""

    benchmark: str
    name: str
    value: float
    unit: str
    target: float | None = None
    met: bool | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, benchmark: str, name: str, found: Value) -> Figure:
        return cls(
            benchmark,
            name,
            float(found.value),
            found.unit,
            found.target,
            None if (met := found.judged()) is None else bool(met),
            found.low,
            found.high,
        )

    def shown(self) -> str:
        """The figure with its interval, for people."""
        text = shown(self.value, self.unit)
        if self.low is None or self.high is None:
            return text
        return f"{text} ({shown(self.low, self.unit)} to {shown(self.high, self.unit)})"

    def verdict(self) -> str:
        """`0.3 s: met`; empty without a target."""
        if self.met is None:
            return ""
        word = "met" if self.met else "MISSED"
        return word if self.target is None else f"{shown(self.target, self.unit)}: {word}"


def shown(value: float, unit: str) -> str:
    """A value in words for people."""
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{100 * value:.{1 if abs(value) >= 0.01 else 2}f} %"
    if unit == "per s":
        return f"{format_count(value)}/s"
    return f"{value:,.0f}" if unit == "count" else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when a figure was taken, of which commit, and what else the machine did by then.

    Attributes:
        load_begin: load average over a minute when the cell began; `load_end` when it ended.
        steal: share of the processors' time in between that other virtual machines had.
    """

    cpu: str
    cores: int
    system: str
    versions: Mapping[str, str]
    commit: str
    date: str
    load_begin: float
    load_end: float
    steal: float

    @property
    def place(self) -> tuple[str, int, str, tuple[tuple[str, str], ...]]:
        """What makes figures comparable: hardware, system and versions."""
        return self.cpu, self.cores, self.system, tuple(sorted(self.versions.items()))

    @property
    def load(self) -> float:
        return max(self.load_begin, self.load_end)

    @property
    def busy(self) -> str:
        """What says that others had the machine, too; empty where it was quiet."""
        said = []
        if self.load > BUSY_LOAD_PER_CORE * self.cores:
            said.append(f"load {self.load:.1f} on {self.cores} cores")
        if self.steal > BUSY_STEAL:
            said.append(f"steal {self.steal:.0%}")
        return ", ".join(said)

    def lines(self) -> tuple[str, str]:
        """One line about the machine, one about the versions."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"machine: {self.cpu}, {self.cores} cores, {self.system}",
            f"versions: {versions}, commit {self.commit}",
        )


class Watch:
    """This machine, from now to each look at it."""

    def __init__(self) -> None:
        cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        self._cpu = cpu[1] if cpu else platform.processor()
        self._versions = {name: version(name) for name in PACKAGES} | {"Python": platform.python_version()}
        self._commit = commit_of(Path(__file__).parents[1])
        self._load, self._ticks = os.getloadavg()[0], processor_ticks()

    def look(self) -> Machine:
        """The machine since the last look."""
        load, ticks = os.getloadavg()[0], processor_ticks()
        passed = [now - before for before, now in zip(self._ticks, ticks, strict=True)]
        machine = Machine(
            cpu=self._cpu,
            cores=len(os.sched_getaffinity(0)),
            system=f"{platform.system()} {platform.release()}",
            versions=self._versions,
            commit=self._commit,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            load_begin=self._load,
            load_end=load,
            steal=passed[7] / max(1, sum(passed)),
        )
        self._load, self._ticks = load, ticks
        return machine


def processor_ticks() -> Sequence[int]:
    """Of all processors: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def commit_of(folder: Path) -> str:
    """The commit, followed by a digest of what differs from it; `unknown` without a repository."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").decode().strip()
        changes = git("diff", "HEAD", "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else head


class Row(NamedTuple):
    """A figure and where it was taken."""

    figure: Figure
    machine: Machine

    def to_json(self) -> str:
        return json.dumps(asdict(self.figure) | {"machine": asdict(self.machine)})

    @classmethod
    def from_json(cls, line: str) -> Row:
        found: dict[str, Any] = json.loads(line)
        machine = Machine(**found.pop("machine"))
        return cls(Figure(**found), machine)


@dataclass(frozen=True, slots=True)
class Record:
    """A file with one row per line, in the order in which they were measured."""

    path: Path

    def rows(self) -> list[Row]:
        """All whole lines; one without its end was cut off when its process was killed."""
        text = self.path.read_text() if self.path.exists() else ""
        return [Row.from_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def append(self, rows: Iterable[Row]) -> None:
        """Write a cell in one piece; a line that was cut off goes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            whole = file.read()
            file.truncate(whole.rfind(b"\n") + 1)
            file.write("".join(f"{row.to_json()}\n" for row in rows).encode())


def current(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """Of each benchmark the figures of the commit and machine that measured last, each the newest.

    They come in the order of the first row of each.
    """
    rows = list(rows)
    last = {row.figure.benchmark: (row.machine.commit, row.machine.place) for row in rows}
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if (row.machine.commit, row.machine.place) == last[row.figure.benchmark]:
            found[row.figure.benchmark, row.figure.name] = row
    return found
