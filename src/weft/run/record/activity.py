"""`Activity`: a monitor that tells working processes from waiting ones. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# Share of one thread's time. A gloo thread that polls for a message uses a tenth of this.
WAITING_SHARE = 0.01
# The kernel's letter for a thread that waits for a disk.
_DISK = "D"


class Activity:
    """The seconds for which some processes have been quiet: no thread computed, or waited for a disk.

    A thread's state at one look proves nothing: on a busy machine polling threads queue for a core, too.

    Args:
        limit_s: the limit of `quiet_s`; a thread computes if it uses `WAITING_SHARE` of these seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.quiet_s = 0.0
        self._least_s = WAITING_SHARE * limit_s
        self._used_s: dict[int, float] = {}

    def look(self, processes: Collection[int], passed_s: float) -> None:
        """Look at the remaining processes, `passed_s` after the last look."""
        used_s = dict(pair for process in processes for pair in _processor_s(process))
        former_s = self._used_s = self._used_s or used_s
        computed = any(used_s[one] - former_s.get(one, 0.0) >= self._least_s for one in used_s)
        if computed or any(_waits_for_disk(process) for process in processes):
            self.quiet_s, self._used_s = 0.0, used_s
        else:
            self.quiet_s += passed_s


def _processor_s(process: int) -> Iterator[tuple[int, float]]:
    """Yield (thread id, seconds of processor time) of all threads."""
    with suppress(psutil.NoSuchProcess):
        for thread in psutil.Process(process).threads():
            yield thread.id, thread.user_time + thread.system_time


def _waits_for_disk(process: int) -> bool:
    """Return True if any thread waits for a disk, where the kernel shows it (Linux)."""
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        # A thread may end before this reads it.
        with suppress(OSError):
            if path.read_text().rpartition(") ")[2].startswith(_DISK):
                return True
    return False
