"""SIGTERM as an exception, so that a program cleans up before it exits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143) inside the block, if this is the main thread."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
