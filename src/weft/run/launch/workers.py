"""`launch_workers`: start the ranks of a local run and wait for them. Never imports torch."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from weft.errors import InputError, RunError, Violation
from weft.installed import remedy
from weft.lab.place import current_lab
from weft.run.launch.failures import logs_folder
from weft.run.launch.rolls import Replicas
from weft.signals import terminable

POLL_S = 0.2


def launch_workers(
    run_dir: Path,
    world_size: int,
    module: str,
    on_poll: Callable[[], None] | None = None,
    *,
    replicas: Replicas | None = None,
) -> None:
    """Run `python -m MODULE RUN_DIR` on `world_size` local ranks and return when all have succeeded.

    Inside a lab (`weft lab`) each rank runs on its device of the lab. `RUN_DIR/logs/rank-N.log` receives a
    worker's output. Ctrl-C and SIGTERM go on to the workers, which get time to save; a second Ctrl-C kills.
    If a worker fails then, or has to be killed, a note of the exception states it. No kill of this process
    leaves a worker behind.

    Args:
        on_poll: called several times a second while the workers run.
        replicas: the others go on when the process of one is killed, which is replaced; None: the run ends.

    Raises:
        InputError: when torch is missing, the workers refused their input, or a lab has fewer devices.
        RunError: when a rank failed: one line, with the path of its log.
        KeyboardInterrupt: after Ctrl-C, when the workers have ended.
        SystemExit: with code 143 after SIGTERM, when the workers have ended.
    """
    require_torch()
    if (lab := current_lab()) is not None:
        lab.require_ranks(world_size)
    logs = logs_folder(run_dir)
    logs.mkdir(parents=True, exist_ok=True)
    options = [str(run_dir), str(world_size), module, str(os.getpid())]
    if replicas is not None:
        options.append(json.dumps(replicas))
    command = [sys.executable, "-m", "weft.run.launch.agent", *options]
    with (
        terminable(),
        open(logs / "agent.log", "ab") as log,
        # The agent has its own session: Ctrl-C must reach the workers once, through this process.
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True) as agent,
    ):
        try:
            report = _wait(agent, on_poll)
        except (KeyboardInterrupt, SystemExit) as stop:
            agent.send_signal(signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
            if report := agent.communicate()[0]:
                stop.add_note(json.loads(report)["lines"][0])
            raise
        finally:
            # The agent has ended or this function has failed; killing the agent ends all ranks.
            agent.kill()
    if agent.returncode != 0:
        raise _failure(agent.returncode, report, logs / "agent.log")


def require_torch() -> None:
    """Refuse to start without torch; check this without importing it.

    Raises:
        InputError: with the remedy.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"torch is not installed, and this needs it: {remedy('torch')}")


def _wait(agent: subprocess.Popen[bytes], on_poll: Callable[[], None] | None) -> bytes:
    """Wait for the agent's end and return its output."""
    while True:
        try:
            return agent.communicate(timeout=POLL_S)[0]
        except subprocess.TimeoutExpired:
            if on_poll is not None:
                on_poll()


def _failure(exit_code: int, report: bytes, agent_log: Path) -> InputError | RunError:
    try:
        record = json.loads(report)
    except ValueError:
        if exit_code < 0:
            reason = f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
        else:
            reason = f"ended with exit code {exit_code}"
        return RunError(f"the agent that runs the workers {reason} (log: {agent_log})")
    if record["refused"]:
        return InputError([Violation("", line) for line in record["lines"]])
    return RunError(f"{record['lines'][0]} (log: {record['log']})")
