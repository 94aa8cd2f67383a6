"""Commands inside a lab: one for weft's own launcher, or one on every node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from weft.errors import InputError, Violation
from weft.lab.lab import Lab
from weft.lab.place import Place

POLL_S = 0.05
# Time limit of a stopped command: a training run saves a checkpoint first.
STOP_S = 120.0


def run_launcher(lab: Lab, command: Sequence[str]) -> int:
    """Run a command once, outside the nodes; ranks that weft starts inside it move to their nodes.

    Return its exit code, or 128 plus the number of the signal that ended it.

    Raises:
        InputError: when the command cannot be started.
        KeyboardInterrupt: after Ctrl-C, when the command has ended.
        SystemExit: after SIGTERM in `terminable`, when the command has ended.
    """
    return _run([(lab.launcher, lab.launcher_environment())], command)


def run_on_nodes(lab: Lab, command: Sequence[str]) -> int:
    """Run a command on every node at the same time; a failure on one node ends the others.

    Return 0, or the exit code of the first failed command.

    Raises:
        As `run_launcher`.
    """
    return _run([(place, lab.node_environment(index)) for index, place in enumerate(lab.nodes)], command)


def _run(starts: Sequence[tuple[Place, Mapping[str, str]]], command: Sequence[str]) -> int:
    processes: list[subprocess.Popen[bytes]] = []
    if shutil.which(command[0]) is None:
        raise InputError(Violation("lab", f"{command[0]}: no such command"))
    try:
        for place, variables in starts:
            processes.append(_start(place, variables, command))
        return _first_failure(processes)
    except (KeyboardInterrupt, SystemExit) as stop:
        _stop(processes, signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(place: Place, variables: Mapping[str, str], command: Sequence[str]) -> subprocess.Popen[bytes]:
    # In its own session: Ctrl-C in the terminal must reach it once, through this process.
    try:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env={**os.environ, **variables},
            preexec_fn=place.enter,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(Violation("lab", f"{command[0]} cannot be started: {error}")) from None


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return 128 - failed if failed < 0 else failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)


def _stop(processes: Sequence[subprocess.Popen[bytes]], signal_number: int) -> None:
    """Forward a signal and wait; a second Ctrl-C or SIGTERM ends the wait."""
    for process in processes:
        process.send_signal(signal_number)
    deadline = time.monotonic() + STOP_S
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
