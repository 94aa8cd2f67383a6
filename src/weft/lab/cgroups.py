"""Control groups with a quota of processor time: one for each rank, and for the commands of a lab.

Version 1 (`cpu.cfs_quota_us`) where the `cpu` controller is mounted as version 1, else version 2 (`cpu.max`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, RunError, Violation
from weft.lab.scheme import pid_of, quota_and_period_us

MOUNTS = Path("/proc/mounts")
MEMBERS = "cgroup.procs"
ENDING_S, POLL_S = 5.0, 0.01


@dataclass(frozen=True, slots=True)
class Controller:
    """The root folder of control groups with quotas; `version` is 1 or 2."""

    root: Path
    version: int

    def make(self, lab: str, name: str, quota: float | None) -> Path:
        """Make a group of a lab with a quota in cores (None: no limit) and return its folder.

        Raises:
            InputError: when the kernel refuses.
        """
        path = self.root / lab / name
        try:
            path.mkdir(parents=True, exist_ok=True)
            if self.version == 2:
                for parent in (self.root, self.root / lab):
                    (parent / "cgroup.subtree_control").write_text("+cpu")
            if quota is not None:
                for file, text in quota_files(self.version, quota):
                    (path / file).write_text(text)
        except OSError as error:
            raise InputError(Violation("lab", f"{path}: no quotas can be set: {error.strerror}")) from None
        return path

    def labs(self) -> list[str]:
        """Return the sorted names of all labs with control groups."""
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and pid_of(path.name))

    def remove(self, lab: str) -> None:
        """Kill the processes in a lab's groups, and remove the groups.

        Raises:
            RunError: when processes have not ended after `ENDING_S`.
        """
        groups = [path for path in (self.root / lab).glob("*") if path.is_dir()]
        deadline = time.monotonic() + ENDING_S
        while True:
            for pid in (members := [pid for group in groups for pid in _members(group)]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not members and all(_removed(path) for path in (*groups, self.root / lab)):
                return
            if time.monotonic() > deadline:
                raise RunError(f"{self.root / lab}: processes do not end: {members}")
            time.sleep(POLL_S)


def find_controller(mounts: str | None = None) -> Controller:
    """Find this system's `cpu` controller; `mounts` replaces the text of /proc/mounts.

    Raises:
        InputError: when the system has none.
    """
    for kind, root, options in _mounts(MOUNTS.read_text() if mounts is None else mounts):
        if kind == "cgroup" and "cpu" in options:
            return Controller(root, 1)
        controllers = root / "cgroup.controllers"
        if kind == "cgroup2" and controllers.is_file() and "cpu" in controllers.read_text().split():
            return Controller(root, 2)
    problem = "no control groups with processor quotas are mounted here (cgroup v1 cpu, or cgroup2 with cpu)"
    raise InputError(Violation("lab", problem))


def quota_files(version: int, quota: float) -> Iterator[tuple[str, str]]:
    """Yield the (file, content) pairs that limit a group to `quota` cores."""
    quota_us, period_us = quota_and_period_us(quota)
    if version == 2:
        yield "cpu.max", f"{quota_us} {period_us}"
        return
    yield "cpu.cfs_period_us", str(period_us)
    yield "cpu.cfs_quota_us", str(quota_us)


def _mounts(text: str) -> Iterator[tuple[str, Path, list[str]]]:
    for line in text.splitlines():
        _, root, kind, options = line.split()[:4]
        yield kind, Path(root), options.split(",")


def _removed(path: Path) -> bool:
    """Remove a group and return True if it is gone; removal can fail just after its last process ended."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _members(group: Path) -> list[int]:
    try:
        return [int(line) for line in (group / MEMBERS).read_text().split()]
    except OSError:
        return []
