"""`RankProcesses`: the workers of a local run as processes: started, watched, signalled. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

from weft.run.launch.flight_recorder import WRITE

POLL_S = 0.05
# A rank writes its flight recorder within milliseconds.
RECORD_S = 0.3


class _Started(NamedTuple):
    """A process; `ended` returns its exit code, None while it runs."""

    pid: int
    ended: Callable[[], int | None]
    reader: Connection


class RankProcesses:
    """One process per rank, each in its own process group, so that a kill also reaches its child processes.

    On Linux the processes are copies of this one, with its imported modules. So it must have no threads
    but those of libraries that handle forks, as BLAS and Arrow do.

    Args:
        main: takes a rank and the pipe for the report of a failure. Outside of Linux it must be picklable.

    Attributes:
        exit_codes: those of the ended ranks, in the order of their ends; negative for a signal.
        words: the bytes that each rank has written to its pipe.
    """

    def __init__(self, main: Callable[[int, Connection], None], ranks: int) -> None:
        context = get_context("fork") if sys.platform == "linux" else get_context("spawn")
        self.exit_codes: dict[int, int] = {}
        self.words = dict.fromkeys(range(ranks), b"")
        self._running: dict[int, _Started] = {}
        for rank in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_in_own_group, args=(main, rank, writer))
            process.start()
            assert process.pid is not None
            self._watch(rank, process.pid, partial(getattr, process, "exitcode"), reader, writer)

    def replace(self, rank: int, module: str, *arguments: str) -> None:
        """Start a new process for a rank that has ended.

        It is a fresh interpreter, because this process may have threads by now. It runs `module`, as
        `python -m` does, with the arguments, its rank and the number of its end of the pipe.
        """
        del self.exit_codes[rank]
        self.words[rank] = b""
        reader, writer = get_context("spawn").Pipe(duplex=False)
        command = [sys.executable, "-m", module, *arguments, str(rank), str(writer.fileno())]
        process = subprocess.Popen(command, pass_fds=[writer.fileno()])
        self._watch(rank, process.pid, process.poll, reader, writer)

    def give_up(self, rank: int) -> None:
        """Forget the end of a rank, so that it does not count as a failure."""
        del self.exit_codes[rank]

    def _watch(
        self, rank: int, pid: int, ended: Callable[[], int | None], reader: Connection, writer: Connection
    ) -> None:
        # Both sides make the group: a signal may come before the process runs, or after it has ended.
        with suppress(OSError):
            os.setpgid(pid, pid)
        writer.close()
        os.set_blocking(reader.fileno(), False)
        self._running[rank] = _Started(pid, ended, reader)

    @property
    def running(self) -> dict[int, int]:
        """Process id by rank."""
        return {rank: one.pid for rank, one in self._running.items()}

    @property
    def failed(self) -> bool:
        return any(self.exit_codes.values())

    def poll(self) -> None:
        """Wait `POLL_S`, read the ranks' pipes and note ended ranks."""
        time.sleep(POLL_S)
        for rank, one in list(self._running.items()):
            exit_code = one.ended()
            # Read after the poll, so that all output of an ended rank is read.
            self._read(rank, one.reader)
            if exit_code is not None:
                self.exit_codes[rank] = exit_code
                del self._running[rank]
                one.reader.close()

    def send(self, number: int) -> None:
        """Send a signal to the running ranks and their child processes."""
        for pid in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    def ask_for_record(self) -> None:
        """Let the running ranks write their flight recorders; wait `RECORD_S`."""
        self.send(WRITE)
        for _ in range(round(RECORD_S / POLL_S)):
            if self._running:
                self.poll()

    def end(self, grace_s: float) -> None:
        """End the running ranks with SIGTERM, and after `grace_s` with SIGKILL."""
        self.send(signal.SIGTERM)
        for _ in range(round(grace_s / POLL_S)):
            if self._running:
                self.poll()
        self.kill()

    def kill(self) -> None:
        """Kill the running ranks and wait for their end."""
        self.send(signal.SIGKILL)
        while self._running:
            self.poll()

    def _read(self, rank: int, reader: Connection) -> None:
        with suppress(BlockingIOError):  # nothing yet; empty: the end
            while part := os.read(reader.fileno(), 1 << 16):
                self.words[rank] += part


def _in_own_group(main: Callable[[int, Connection], None], rank: int, pipe: Connection) -> None:
    os.setpgid(0, 0)
    main(rank, pipe)
