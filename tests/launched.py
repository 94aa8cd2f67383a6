"""A worker for tests of the launcher: `python -m launched RUN_DIR` does what RUN_DIR/behaviour says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from weft.errors import InputError, RunError, Violation
from weft.files import naming


def load(run_dir: Path) -> None:
    with open(run_dir / "loaded", "a") as file:
        file.write(f"{os.getpid()}\n")


def main(run_dir: Path) -> None:
    behaviour = (run_dir / "behaviour").read_text()
    rank = int(os.environ["RANK"])
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    if behaviour == "sleep":
        time.sleep(120)
    elif behaviour == "refuse":
        raise InputError([Violation("run.toml", "first"), Violation("run.toml", "second")])
    elif behaviour == "fail" and rank == 1:
        raise RunError("the loss is not\na number")
    elif behaviour == "die at start" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "stop and die":
        while rank == 1 and not stopped(run_dir / "pid-0"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGSTOP)
    elif behaviour == "save":
        stop_and_save(run_dir, rank)
    elif behaviour == "fill" and rank == 1:
        while not (run_dir / "pid-0").exists() or not (run_dir / "pid-0").read_text():
            time.sleep(0.05)
        with naming(run_dir / "filler"), open(run_dir / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    elif behaviour == "hang":
        hang(run_dir, rank)
    else:
        meet_and_fall_out(run_dir, rank, behaviour)


def stopped(pid_file: Path) -> bool:
    pid = pid_file.read_text() if pid_file.exists() else ""
    return bool(pid) and psutil.Process(int(pid)).status() == psutil.STATUS_STOPPED


def stop_and_save(run_dir: Path, rank: int) -> None:
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    (run_dir / f"ready-{rank}").touch()
    while not stopped:
        time.sleep(0.05)
    (run_dir / f"saved-{rank}").write_text(str(stopped[0]))


def hang(run_dir: Path, rank: int) -> None:
    """Both know how to stop; rank 1 does not answer, and rank 0 waits for it."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    (run_dir / f"ready-{rank}").touch()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(600)


def meet_and_fall_out(run_dir: Path, rank: int, behaviour: str) -> None:
    import torch
    import torch.distributed as dist

    from weft.run.launch.worker_start import start_worker
    from weft.run.transport.channels import open_channels
    from weft.run.work_queue import WorkQueue

    context = start_worker()
    value = torch.tensor([rank])
    dist.all_reduce(value)
    print(f"rank {rank} of {context.world_size} on {context.threads} threads: {value.item()}", flush=True)
    if behaviour == "listen":
        listen(run_dir, rank)
    if behaviour == "be stuck":
        if rank == 1:
            raise RunError("a kernel is broken")
        # In C, where no handler of Python runs.
        reader, _ = os.pipe()
        ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
    if behaviour == "lose a peer":
        channels = open_channels({1 - rank}, 60.0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        inbox, tensor = channels.incoming(1, "activation", 8), torch.empty(2)
        inbox.receive(WorkQueue("messages"), "F0.0", tensor).wait()
    context.close()


def listen(run_dir: Path, rank: int) -> None:
    """Rank 0 waits for connections of rank 1, which believes that it has no peers."""
    from weft.run.transport.channels import open_channels

    if rank == 0:
        (run_dir / "ready-0").touch()
        open_channels({1}, 600.0)
    open_channels(set(), 60.0)
    (run_dir / "ready-1").touch()
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
