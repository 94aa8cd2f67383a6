"""Speeds of this machine: matmuls and memory by size, kernel launches, messages and all-reduces.

All local ranks measure at the same time, because they run at the same time later. Shared caches, memory
controllers and turbo clocks are part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing

import torch
import torch.distributed as dist

from weft.capture.interference import measure_interference
from weft.capture.message_line import MessageLine
from weft.capture.timing import Timing, repeat, slowest, summarise
from weft.describe.cluster import Cluster
from weft.predict.profile import MachineMeasurement
from weft.run.runtime import TIMEOUT_S
from weft.run.transport.channels import Channels, open_channels

MATMUL_SIZES = (64, 128, 256, 512, 1024)
MEMORY_BYTES = (2**16, 2**20, 2**24, 2**26)
MESSAGE_BYTES = (0, 2**14, 2**17, 2**20, 2**22)
REDUCE_BYTES = (2**12, 2**16, 2**20, 2**22)
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}


def measure_machine(
    cluster: Cluster, device: torch.device, *, precisions: tuple[str, ...] = ("fp32",), budget_s: float = 0.08
) -> MachineMeasurement:
    """Measure `cluster`, this machine, from inside an initialised process group of all its devices.

    Every rank returns the slowest rank's figures. Each single quantity takes `budget_s` seconds. Messages and
    all-reduces are measured between the ranks of the group; a group of one leaves these tables empty.
    """
    matmul = {
        name: tuple(_matmul_speed(size, TORCH_DTYPES[name], device, budget_s) for size in MATMUL_SIZES)
        for name in precisions
    }
    memory = tuple(_memory_speed(size, device, budget_s) for size in MEMORY_BYTES)
    interference = measure_interference(cluster, device)
    launch = _timed_together(_launch(device), device, budget_s)
    messages: list[tuple[float, float]] = []
    reductions = []
    if dist.get_world_size() > 1:
        messages = _messages(device)
        for size in REDUCE_BYTES:
            reductions.append((float(size), _all_reduce_seconds(size, device)))
    return MachineMeasurement(
        device=cluster.groups[0].device.name,
        matmul=matmul,
        memory=memory,
        launch_s=launch.seconds,
        instruction_s=interference.instruction_s,
        compute_slowdown=interference.compute_slowdown,
        communication_slowdown=interference.communication_slowdown,
        message=tuple(messages),
        all_reduce=tuple(reductions),
        spread=launch.spread,
    )


def _timed_together(call: Callable[[], object], device: torch.device, budget_s: float) -> Timing:
    def finished() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    return slowest(repeat(finished, budget_s=budget_s))


def _matmul_speed(
    size: int, dtype: torch.dtype, device: torch.device, budget_s: float
) -> tuple[float, float]:
    left = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(left)
    timing = _timed_together(lambda: torch.mm(left, left, out=out), device, budget_s)
    flops = 2.0 * size**3
    return flops, flops / timing.seconds


def _memory_speed(size: int, device: torch.device, budget_s: float) -> tuple[float, float]:
    source = torch.ones(size // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = _timed_together(lambda: torch.add(source, 1.0, out=target), device, budget_s)
    return float(size), size / timing.seconds


def _launch(device: torch.device) -> Callable[[], object]:
    small = torch.ones(1, device=device)
    return lambda: small.add_(1.0)


def _messages(device: torch.device) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of messages between ranks 0 and 1; the other ranks wait."""
    rank = dist.get_rank()
    channels = open_channels({1 - rank} if rank < 2 else (), TIMEOUT_S)
    found = [(float(size), message_seconds(channels, size, device, (0, 1))) for size in MESSAGE_BYTES]
    channels.close()
    return found


def message_seconds(
    channels: Channels, size: int, device: torch.device, pair: tuple[int, int], rounds: int = 20
) -> float:
    """Return the seconds of half a round trip of `size` bytes between two ranks; the other ranks wait."""
    rank, first = dist.get_rank(), pair[0]
    peer = pair[1] if rank == first else first
    tensor = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)

    seconds = []
    dist.barrier()
    if rank in pair:
        with closing(MessageLine(channels, peer, peer, tensor)) as line:
            for _ in range(rounds):
                start = time.perf_counter()
                if rank == first:
                    line.send()
                line.receive().wait()
                if rank != first:
                    line.send()
                seconds.append((time.perf_counter() - start) / 2.0)
    dist.barrier()
    return slowest(summarise(seconds[2:]) if seconds else Timing(0.0, 0.0)).seconds


def _all_reduce_seconds(size: int, device: torch.device, rounds: int = 12) -> float:
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    seconds = []
    dist.barrier()
    for _ in range(rounds):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    return slowest(summarise(seconds[2:])).seconds
