"""`Activity`: whether processes work, or only wait. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

# Processor time of one process: who waits and looks around now and then uses less in the seconds of a limit.
WAITING_SHARE = 0.01
# In the kernel's letters: a thread that runs or would, and one that waits for a disk.
_WORKING = frozenset("RD")


class Activity:
    """How long some processes have been quiet: all of them asleep, stopped, or waiting for a message.

    Args:
        limit_s: what `quiet_s` will be compared with; processor time is counted over such a while.
    """

    def __init__(self, limit_s: float) -> None:
        self.quiet_s = 0.0
        self._least_s = WAITING_SHARE * limit_s
        self._used_s: dict[int, float] = {}

    def look(self, processes: Collection[int], passed_s: float) -> None:
        """Look at the processes that are left, `passed_s` after the last look."""
        used_s = {process: _processor_s(process) for process in processes}
        worked = any(
            used_s[process] - self._used_s.setdefault(process, used_s[process]) >= self._least_s
            or not _WORKING.isdisjoint(_thread_states(process))
            for process in processes
        )
        if worked:
            self.quiet_s, self._used_s = 0.0, used_s
        else:
            self.quiet_s += passed_s


def _processor_s(process: int) -> float:
    try:
        times = psutil.Process(process).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _thread_states(process: int) -> set[str]:
    """Of all threads, where the kernel tells (Linux)."""
    found = set()
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        # A thread may end before it is looked at.
        with suppress(OSError):
            found.add(path.read_text().rpartition(") ")[2][:1])
    return found
