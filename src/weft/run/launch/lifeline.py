"""Die with the parent: no kill of a launcher or an agent leaves an orphan.

On Linux the kernel does it; elsewhere a thread watches. This module imports no torch: the lifeline starts as
soon as Python has started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from weft.errors import RunError

WATCH_INTERVAL_S = 0.5

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(expected_parent_pid: int) -> None:
    """Have this process killed (SIGKILL) when its parent dies.

    If the parent is already gone, the process exits at once.

    Raises:
        RunError: when the kernel refuses.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RunError(f"cannot tie this process to its parent (prctl PR_SET_PDEATHSIG): {reason}")
    else:
        watch_parent(expected_parent_pid)
    if os.getppid() != expected_parent_pid:
        os._exit(1)


def show_as(name: str) -> None:
    """Name this process in `ps` and `top`: up to 15 characters, on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def watch_parent(expected_parent_pid: int) -> None:
    """Start a thread that ends this process once it has another parent than expected."""

    def watch() -> None:
        while os.getppid() == expected_parent_pid:
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="weft-lifeline", daemon=True).start()
