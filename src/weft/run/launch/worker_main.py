"""The process that the agent starts for every rank: a lifeline and a log, then the worker's module.

    python -m weft.run.launch.worker_main MODULE RUN_DIR

The lifeline comes before the slow imports, so that no worker outlives an agent that dies while they load.
Standard output is a pipe to the agent, which carries the report of a failure and nothing else.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from weft.errors import InputError
from weft.lab.place import enter_rank
from weft.run.launch.failures import leave_word, log_path
from weft.run.launch.lifeline import die_with_parent

AGENT_PID = "WEFT_AGENT_PID"


def main(module: str, run_dir: Path) -> None:
    """Run the worker's module as `python -m MODULE RUN_DIR`; its failure ends this process."""
    die_with_parent(int(os.environ[AGENT_PID]))
    rank = int(os.environ["RANK"])
    agent = os.dup(1)
    sys.argv = [module, str(run_dir)]
    try:
        _print_to(log_path(run_dir, rank))
        # Enter before any thread starts: a thread would stay in the old place.
        enter_rank(rank)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        leave_word(agent, rank, error)
        # The log's disk may be full.
        with suppress(OSError):
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        # A normal exit may hang: threads wait for a lost peer, or process groups are being torn down.
        os._exit(2 if isinstance(error, InputError) else 1)


def _print_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
