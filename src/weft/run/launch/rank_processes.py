"""`RankProcesses`: the workers of a local run as processes: started, watched, signalled. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

POLL_S = 0.05


class RankProcesses:
    """One process per rank, each in its own session, so that a kill also reaches its child processes.

    Attributes:
        exit_codes: those of the ended ranks, in the order of their ends; negative for a signal.
        words: the bytes that each rank has written to its standard output.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self.exit_codes: dict[int, int] = {}
        self.words = dict.fromkeys(range(len(environments)), b"")
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for rank, environment in enumerate(environments):
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._running[rank] = process

    @property
    def running(self) -> dict[int, int]:
        """Process id by rank."""
        return {rank: process.pid for rank, process in self._running.items()}

    @property
    def failed(self) -> bool:
        return any(self.exit_codes.values())

    def poll(self) -> None:
        """Wait `POLL_S`, read the ranks' output and note ended ranks."""
        time.sleep(POLL_S)
        for rank, process in list(self._running.items()):
            exit_code = process.poll()
            # Read after the poll, so that all output of an ended rank is read.
            self._read(rank, process)
            if exit_code is not None:
                self.exit_codes[rank] = exit_code
                del self._running[rank]
                assert process.stdout is not None
                process.stdout.close()

    def send(self, number: int) -> None:
        """Send a signal to the running ranks and their child processes."""
        for process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

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

    def _read(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while part := process.stdout.read(1 << 16):  # None: nothing yet; empty: the end
            self.words[rank] += part
