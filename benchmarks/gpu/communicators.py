"""All GPUs of this machine: the memory of NCCL's communicators beside the predicted bytes.

Every rank opens communicators one by one, as a run does, and calls each once: for an all-reduce of two ranks,
of all ranks, and for a message in one direction. The bytes are those that the device has less afterwards, on
the rank with the most. `--link` is the bandwidth between two GPUs in one direction, in bytes/s.

    python benchmarks/gpu/communicators.py --link 300e9
    python benchmarks/gpu/communicators.py --device cpu --link 300e9    # shows that the script runs over gloo
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import Value
from harness import Report, launch, parser_of_ranks

from weft.describe.prediction import COMMUNICATOR_SPREAD
from weft.predict.cost.communicators import collective_bytes, message_bytes
from weft.run.launch.worker_start import start_worker
from weft.run.transport.device_group import GLOO, NCCL, DeviceGroup

TIMEOUT = timedelta(seconds=120)


def options() -> argparse.ArgumentParser:
    made = parser_of_ranks(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--link", type=float, required=True, help="bytes/s between two GPUs, one direction")
    return made


def main() -> int:
    asked = options().parse_args()
    report = Report("communicators", asked)
    if asked.worker:
        measure(report, asked)
        return 0
    ranks = torch.cuda.device_count() if asked.device == "cuda" else 2
    if ranks < 2:
        report.say("fewer than two CUDA devices: nothing was measured")
        return 0
    report.print_machine()
    return launch(__file__, ranks, asked, "--device", asked.device, "--link", str(asked.link))


def measure(report: Report, asked: argparse.Namespace) -> None:
    """Open and use the communicators in turn on each rank; the first one tells."""
    context = start_worker()
    ranks, backend = context.world_size, NCCL if asked.device == "cuda" else GLOO
    device = torch.device(context.device)
    numbers = torch.ones(2**20, device=device)
    # A communicator gives its memory back with its last reference.
    held: list[DeviceGroup] = []

    def opened(name: str, members: int, use: Callable[[DeviceGroup], None]) -> int:
        """The bytes that a communicator of the first ranks takes, on the rank with the most."""
        dist.barrier()
        before = free_bytes(device)
        if context.rank < members:
            held.append(DeviceGroup.open(name, range(members), TIMEOUT, backend))
            use(held[-1])
        dist.barrier()
        taken = torch.tensor([before - free_bytes(device)])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return int(taken)

    def send(group: DeviceGroup) -> None:
        if group.place == 0:
            group.send(numbers, 1)
        else:
            group.receive(numbers, 0)

    def add_up(group: DeviceGroup) -> None:
        group.all_reduce(numbers)

    # What a process takes once for all communicators comes with the first one.
    opened("first", 2, add_up)
    predicted = {
        "collectives of 2 ranks": (2, add_up, collective_bytes(2, asked.link)),
        f"collectives of {ranks} ranks": (ranks, add_up, collective_bytes(ranks, asked.link)),
        "received messages": (2, send, message_bytes(asked.link, received=True)),
    }
    for name, (members, use, expected) in predicted.items():
        taken = opened(name, members, use)
        if context.rank == 0:
            figures = {"predicted": Value(expected, "bytes")}
            if asked.device == "cuda":  # on a CPU nobody counts
                error = abs(expected / max(1, taken) - 1.0)
                figures |= {
                    "taken": Value(taken, "bytes"),
                    "error": Value(error, "share", COMMUNICATOR_SPREAD),
                }
            report.add_cell(name, figures)
    context.close()


def free_bytes(device: torch.device) -> int:
    """Bytes of a device that no process has, after all its kernels; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


if __name__ == "__main__":
    sys.exit(main())
