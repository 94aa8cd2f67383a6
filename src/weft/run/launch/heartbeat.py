"""`beating`: a thread that shows in the rank's slots that its process runs.

The beat stops while the process is stopped, or while a call holds Python's lock (the GIL).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.run.record.recorder import Recorder

BEAT_INTERVAL_S = 0.5


@contextmanager
def beating(recorder: Recorder | None, notice: Callable[[], int]) -> Iterator[None]:
    """Show in the rank's slots, within this block, that its process runs; do nothing without a recorder.

    With every beat `notice` has ended instructions recorded, and returns the bound of their times' error. An
    accelerator tells of them on request only, and the main thread may wait for one that hangs.
    """
    if recorder is None:
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_INTERVAL_S):
            recorder.beat(notice())

    recorder.beat(notice())
    thread = threading.Thread(target=beat, name="weft-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        recorder.rest()
