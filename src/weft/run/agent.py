"""The agent of a local run: torch elastic starts the workers and ends them all when one fails.

    python -m weft.run.agent RUN_DIR WORLD_SIZE MODULE LAUNCHER_PID

It prints one JSON line about a failure to its standard output, which the launcher reads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from weft.lab.place import current_lab, enter_namespace
from weft.run.failures import clear_failures, first_failure, log_path, logs_folder
from weft.run.lifeline import die_with_parent
from weft.run.threads import threads_per_rank
from weft.run.worker_main import AGENT_PID

MEETING_TIMEOUT_S = 60
# For the ranks to save after a signal, and for those that are left when one has failed to say why they fail.
SHUTDOWN_TIMEOUT_S = 120
FAREWELL_TIMEOUT_S = 5


def main(run_dir: Path, world_size: int, module: str, launcher_pid: int) -> int:
    """Run the workers to their end and return the exit code: 0, 1, 2, or 128 plus a signal."""
    die_with_parent(launcher_pid)
    address = _own_address()
    # After the lifeline: these imports take seconds.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    clear_failures(run_dir)
    _set_environment(world_size)
    _shorten_farewell()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=run_dir.resolve().name,
        rdzv_backend="c10d",
        # Port 0: the operating system picks a free one.
        rdzv_endpoint="localhost:0",
        local_addr=address,
        rdzv_configs={"timeout": MEETING_TIMEOUT_S},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs_folder(run_dir) / "elastic")),
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    arguments = ("-m", "weft.run.worker_main", module, str(run_dir))
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        # In the order in which the ranks ended.
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _report(run_dir, exit_codes)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _shorten_farewell() -> None:
    """Kill ranks that do not end soon after one has failed: those that are stopped, or stuck in a call.

    torch elastic does so after 30 s, the default of this function, which it calls without an argument then.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_soon(
        self: PContext, death_sig: signal.Signals | None = None, timeout: int = FAREWELL_TIMEOUT_S
    ) -> None:
        close(self, death_sig, timeout)

    PContext.close = close_soon  # type: ignore[method-assign]


def _report(run_dir: Path, exit_codes: dict[int, int]) -> int:
    failure = first_failure(run_dir, exit_codes)
    record = {
        "refused": failure.refused,
        "lines": list(failure.lines),
        "log": str(log_path(run_dir, failure.rank)),
    }
    print(json.dumps(record), flush=True)
    return 2 if failure.refused else 1


def _own_address() -> str | None:
    """Where workers reach this process, None if torch knows; in a lab it moves beside them first."""
    lab = current_lab()
    if lab is None:
        return None
    enter_namespace(Path(lab.hub))
    return lab.hub_address


def _set_environment(world_size: int) -> None:
    os.environ[AGENT_PID] = str(os.getpid())
    if current_lab() is not None:
        # A rank of a lab is a process of one thread on a part of one core, whatever else the machine has.
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(world_size)))
    if sys.platform == "linux":
        # All ranks are on this host; its name may not resolve to an address that it has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    # A stop that comes before torch elastic handles signals has no worker to tell.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
