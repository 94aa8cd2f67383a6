"""The agent of a local run: starts the workers, hosts their store, and ends them all when one fails.

    python -m weft.run.launch.agent RUN_DIR WORLD_SIZE MODULE LAUNCHER_PID [REPLICAS]

With REPLICAS (`weft.run.launch.rolls.Replicas`, in JSON), the others go on when a process is killed.

It prints one JSON line about a failure to its standard output, which the launcher reads.

It does not use torch elastic: elastic's store listens on all interfaces, for anybody, and unpickles the data
it finds there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.lab.place import current_lab, enter_namespace
from weft.run.launch.failures import first_failure, log_path, logs_folder
from weft.run.launch.flight_recorder import ignore
from weft.run.launch.lifeline import die_with_parent
from weft.run.launch.rank_processes import POLL_S, RankProcesses
from weft.run.launch.rolls import REPLACES, Replicas, RollCall, RollKeeper
from weft.run.launch.threads import threads_per_rank
from weft.run.launch.worker_main import AGENT_PID, load
from weft.run.launch.worker_main import main as worker
from weft.run.record.activity import Activity

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
# Gives the remaining ranks time to report their own failure after one has failed.
FAREWELL_TIMEOUT_S = 5.0
# Limit after a signal while no rank works; loggers get nearly as long to finish.
QUIET_LIMIT_S = 35.0
# Limit after a signal while ranks work: a save may take as long.
STOP_TIMEOUT_S = 1800.0
LOOK_EVERY_S = 1.0


def main(run_dir: Path, world_size: int, module: str, launcher_pid: int, replicas: str = "") -> int:
    """Run the workers to their end and return the exit code: 0, 1, 2, or 128 plus a signal."""
    die_with_parent(launcher_pid)
    # Nothing is under way yet: these signals end the agent at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    server = socket.create_server((_own_address(), 0), backlog=socket.SOMAXCONN)
    os.register_at_fork(after_in_child=server.close)
    os.environ |= _environment(run_dir, world_size, *server.getsockname())
    # The ranks are copies of this process: what takes seconds to import is imported once.
    load(module, run_dir)
    ignore()
    ranks = RankProcesses(partial(worker, module, run_dir), world_size)
    stops: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stops.append(number))
    # After the copies, because it has a thread; it lives until this function returns.
    store = _host_store(server)
    why = ""
    if replicas:
        keeper = RollKeeper(RollCall(store, world_size), Replicas.of_json(replicas))
        why = _go_on(
            ranks, keeper, lambda rank: ranks.replace(rank, worker.__module__, module, str(run_dir)), stops
        )
    while ranks.running and not ranks.failed and not stops:
        ranks.poll()
    if stops:
        _stop(run_dir, ranks, signal.Signals(stops[0]))
        return 128 + stops[0]
    if ranks.failed:
        ranks.ask_for_record()
        ranks.end(FAREWELL_TIMEOUT_S)
        return _report_first(run_dir, ranks, ranks.exit_codes, why)
    return 0


def _go_on(
    ranks: RankProcesses, keeper: RollKeeper, replace: Callable[[int], None], stops: Sequence[int]
) -> str:
    """Replace killed ranks until all present ones have succeeded.

    It returns earlier after a signal, and with the reason where the run cannot go on.
    """
    os.environ[REPLACES] = "1"
    while any(map(keeper.is_member, ranks.running)):
        if stops:
            return ""
        ranks.poll()
        ended = {rank: code for rank, code in ranks.exit_codes.items() if code}
        if lost := [rank for rank in ended if keeper.is_member(rank)]:
            why = keeper.lose(lost, ranks.exit_codes)
            if why is not None:
                return why
        for rank, exit_code in ended.items():
            if keeper.replaces(rank, exit_code):
                replace(rank)
            else:
                ranks.give_up(rank)
        keeper.admit()
    # A new process may still be on its way.
    ranks.kill()
    for rank in [one for one in ranks.exit_codes if not keeper.is_member(one)]:
        ranks.give_up(rank)
    return ""


def _host_store(server: socket.socket) -> TCPStore:
    """Return the store over which the workers meet; it lives as long as this object."""
    from torch.distributed import TCPStore

    address, port = server.getsockname()
    # A socket made by the store would listen on all interfaces, whatever its address.
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def _stop(run_dir: Path, ranks: RankProcesses, number: signal.Signals) -> None:
    """Let the ranks finish their step and save it; kill ranks that do not answer.

    A stuck rank makes the others wait, so that soon no rank works. As long as one works, it may be saving.
    """
    ranks.send(number)
    activity, passed_s = Activity(QUIET_LIMIT_S), 0.0
    # Count pauses and read no clock: the clock goes on while a whole job is suspended.
    while ranks.running and activity.quiet_s < QUIET_LIMIT_S and passed_s < STOP_TIMEOUT_S:
        for _ in range(round(LOOK_EVERY_S / POLL_S)):
            if ranks.running:
                ranks.poll()
        passed_s += LOOK_EVERY_S
        activity.look(ranks.running.values(), LOOK_EVERY_S)
    failed = {rank: code for rank, code in ranks.exit_codes.items() if code not in (0, 128 + number, -number)}
    if left := sorted(ranks.running):
        ranks.ask_for_record()
        ranks.kill()
        named = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
        _report(run_dir, left[0], [f"{named} did not end after {number.name} and had to be killed"])
    elif failed:
        _report_first(run_dir, ranks, failed)


def _report_first(run_dir: Path, ranks: RankProcesses, exit_codes: dict[int, int], why: str = "") -> int:
    failure = first_failure(ranks.words, {rank: code for rank, code in exit_codes.items() if code})
    lines = [f"{failure.lines[0]}; {why}", *failure.lines[1:]] if why else failure.lines
    _report(run_dir, failure.rank, lines, refused=failure.refused)
    return 2 if failure.refused else 1


def _report(run_dir: Path, rank: int, lines: list[str] | tuple[str, ...], *, refused: bool = False) -> None:
    record = {"refused": refused, "lines": list(lines), "log": str(log_path(run_dir, rank))}
    print(json.dumps(record), flush=True)


def _own_address() -> str:
    """Return this process's address for workers only; inside a lab, first enter the lab's network."""
    lab = current_lab()
    if lab is None:
        return LOOPBACK
    enter_namespace(Path(lab.hub))
    return lab.hub_address


def _environment(run_dir: Path, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the ranks' environment: variables of torchrun, threads, and the interface to listen on."""
    shared = {
        AGENT_PID: str(os.getpid()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # For torch: the store exists, so rank 0 starts none.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # A library that looks for GPUs while it is imported must not start CUDA, which no copy could use.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # See `weft.run.launch.flight_recorder`. If a collective of NCCL times out, torch itself writes one.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str((logs_folder(run_dir) / "nccl-timeout-rank-").resolve()),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(world_size)),
    }
    if current_lab() is not None:
        # A rank of a lab has one thread on a part of one core, and no GPU of the machine.
        shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    elif sys.platform == "linux":
        # All ranks are on this host: the user's own interface would only admit strangers.
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return shared


if __name__ == "__main__":
    try:
        exit_code = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
    except Exception:
        traceback.print_exc()
        exit_code = 1
    # A normal exit would wait for the ranks, which may wait for the store.
    os._exit(exit_code)
