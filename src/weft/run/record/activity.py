"""`Activity`: whether processes work, or only wait. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# Of one thread's time: what those of gloo that wait for a message use for looking around is a tenth of it.
WAITING_SHARE = 0.01
# In the kernel's letters: a thread that waits for a disk.
_DISK = "D"


class Activity:
    """How long some processes have been quiet: no thread of theirs computed, or waited for a disk.

    Whether a thread runs at a look says nothing: on a busy machine those that only look around queue, too.

    Args:
        limit_s: what `quiet_s` will be compared with; processor time is counted over such a while.
    """

    def __init__(self, limit_s: float) -> None:
        self.quiet_s = 0.0
        self._least_s = WAITING_SHARE * limit_s
        self._used_s: dict[int, float] = {}

    def look(self, processes: Collection[int], passed_s: float) -> None:
        """Look at the processes that are left, `passed_s` after the last look."""
        used_s = dict(pair for process in processes for pair in _processor_s(process))
        former_s = self._used_s = self._used_s or used_s
        computed = any(used_s[one] - former_s.get(one, 0.0) >= self._least_s for one in used_s)
        if computed or any(_waits_for_disk(process) for process in processes):
            self.quiet_s, self._used_s = 0.0, used_s
        else:
            self.quiet_s += passed_s


def _processor_s(process: int) -> Iterator[tuple[int, float]]:
    """Thread and processor time, of all threads."""
    with suppress(psutil.NoSuchProcess):
        for thread in psutil.Process(process).threads():
            yield thread.id, thread.user_time + thread.system_time


def _waits_for_disk(process: int) -> bool:
    """Return whether any thread does, where the kernel tells (Linux)."""
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        # A thread may end before it is looked at.
        with suppress(OSError):
            if path.read_text().rpartition(") ")[2].startswith(_DISK):
                return True
    return False
