"""torch's flight recorder of a rank: the collectives and messages that its process groups have begun.

A rank writes it when another rank is gone, or when the agent asks for it. Its main thread may then wait in a
kernel, where no handler of a signal runs. But the interpreter still writes the signal's number into a pipe,
and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from weft.files import write_whole
from weft.run.launch.failures import logs_folder

WRITE = signal.SIGUSR1
# torch's stubs do not have it.
_DUMP = "_dump_fr_trace_json"


def record_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's flight recorder, beside its log."""
    return logs_folder(run_dir) / f"flight-recorder-rank-{rank}.json"


def ignore() -> None:
    """Ignore the agent's request from now on, in the processes that this one starts, too."""
    signal.signal(WRITE, signal.SIG_IGN)


def write_when_asked(path: Path) -> None:
    """Write the flight recorder to `path` whenever the agent asks; the main thread calls it once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(WRITE, lambda *_: None)
    signal.siginterrupt(WRITE, False)
    threading.Thread(target=_serve, args=(reader, path), name="weft-flight-recorder", daemon=True).start()


def _serve(reader: int, path: Path) -> None:
    while number := os.read(reader, 1):
        if number[0] == WRITE:
            write_record(path)


def write_record(path: Path) -> None:
    """Write the flight recorder of this process to `path`; any thread may call it."""
    # The agent imports this module, too, and no torch.
    from torch._C import _distributed_c10d

    # The disk may be full; the rank's own error tells it.
    with suppress(OSError):
        write_whole(path, getattr(_distributed_c10d, _DUMP)().decode())
