"""Processes of Python that Ctrl-C stops, however the tests were started."""

from __future__ import annotations

import sys

# A shell starts what runs in the background with SIGINT ignored, and every process passes that on.
HEED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def interruptible(*words: str) -> list[str]:
    """The command of a Python with these arguments, in which SIGINT raises KeyboardInterrupt."""
    return [sys.executable, "-c", HEED, *words]
