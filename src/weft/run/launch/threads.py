"""How many threads a rank may use. No torch here: the agent asks before it imports anything slow."""

from __future__ import annotations

import os


def threads_per_rank(local_ranks: int) -> int:
    """Threads each of `local_ranks` processes may use of the cores given to this one."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)
