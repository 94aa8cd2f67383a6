"""The threads of a rank. Imports no torch: the agent needs the number before any slow import."""

from __future__ import annotations

import os


def threads_per_rank(local_ranks: int) -> int:
    """Return the threads for each of `local_ranks` processes: an equal part of this process's cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)
