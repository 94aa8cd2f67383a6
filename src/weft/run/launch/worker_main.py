"""The process that the agent starts for every rank: a lifeline and a log, then the worker's module.

    python -m weft.run.launch.worker_main MODULE RUN_DIR RANK PIPE

The first ones are copies of the agent. This command starts those that take the place of others.

A worker's module has `main(run_dir)`, which returns the exit code, or None for 0. It may have
`load(run_dir)`, which imports the modules of the run: the agent calls it once for all ranks.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from weft.errors import InputError
from weft.lab.place import enter_rank
from weft.run.launch.failures import leave_word, log_path
from weft.run.launch.flight_recorder import record_path, write_when_asked
from weft.run.launch.lifeline import die_with_parent, show_as

AGENT_PID = "WEFT_AGENT_PID"


def load(module: str, run_dir: Path) -> None:
    """Import a worker's module, and the modules that its ranks need; the ranks report errors."""
    with suppress(Exception):
        getattr(import_module(module), "load", lambda run_dir: None)(run_dir)


def main(module: str, run_dir: Path, rank: int, agent: Connection) -> None:
    """Run the worker's module and end this process; `agent` takes the report of a failure."""
    die_with_parent(int(os.environ[AGENT_PID]))
    show_as(f"weft-rank-{rank}")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [module, str(run_dir)]
    try:
        _print_to(log_path(run_dir, rank))
        # Enter before any thread starts: a thread would stay in the old place.
        enter_rank(rank)
        write_when_asked(record_path(run_dir, rank))
        exit_code = import_module(module).main(run_dir) or 0
    except Exception as error:
        leave_word(agent.fileno(), rank, error)
        exit_code = 2 if isinstance(error, InputError) else 1
        # The log's disk may be full.
        with suppress(OSError):
            traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # A normal exit may hang: threads wait for a lost peer, or process groups are being torn down.
    os._exit(exit_code)


def _print_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


if __name__ == "__main__":
    with suppress(OSError):
        os.setpgid(0, 0)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Connection(int(sys.argv[4]), readable=False))
