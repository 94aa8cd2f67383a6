"""Processes of Python that Ctrl-C stops, however the tests were started."""

from __future__ import annotations

import sys

# A shell starts what runs in the background with SIGINT ignored, and every process passes that on.
HEED = """
import runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)
_, kind, program, *words = sys.argv
sys.argv = [kind, *words]
if kind == "-m":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    exec(program)
"""


def interruptible(*words: str) -> list[str]:
    """The command of a Python with these arguments, in which SIGINT raises KeyboardInterrupt."""
    return [sys.executable, "-c", HEED, *words]
