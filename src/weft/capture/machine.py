"""Speeds of this machine: matmuls and memory by size, kernel launches, messages and collectives.

All local ranks measure at the same time, because they run at the same time later. Shared caches, memory
controllers and turbo clocks are part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.capture.collectives import measure_collectives, rank_counts
from weft.capture.interference import STEPS, measure_interference
from weft.capture.message_line import Exchange, MessageLine, open_exchange
from weft.capture.timing import Timing, host_seconds, repeat, slowest, summarise
from weft.describe.cluster import Cluster
from weft.predict.profile import COLLECTIVES, MachineMeasurement
from weft.progress import CountedWork, ProgressReport, unwatched
from weft.run.accelerator import accelerator_of, finish
from weft.run.state.precision import PRECISIONS
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser

# In a row on an accelerator: far fewer than its queue of launches holds.
LAUNCHES = 64
MESSAGE_ROUNDS = 20


@dataclass(frozen=True)
class Sizes:
    """The sizes at which speeds are measured: widths of square matmuls, bytes, and values of codecs."""

    matmul: tuple[int, ...]
    memory: tuple[int, ...]
    codec: tuple[int, ...]
    message: tuple[int, ...]
    reduce: tuple[int, ...]


ON_CPU = Sizes(
    matmul=(64, 128, 256, 512, 1024),
    memory=(2**16, 2**20, 2**24, 2**26),
    codec=(2**12, 2**16, 2**20, 2**22),
    message=(0, 2**14, 2**17, 2**20, 2**22),
    reduce=(2**12, 2**16, 2**20, 2**22),
)
# Large enough to keep a whole device busy, and to leave its caches.
ON_ACCELERATOR = Sizes(
    matmul=(128, 512, 1024, 2048, 4096, 8192),
    memory=(2**20, 2**24, 2**28, 2**30),
    codec=(2**16, 2**20, 2**24, 2**28),
    message=(0, 2**14, 2**17, 2**20, 2**24, 2**27),
    reduce=(2**12, 2**16, 2**20, 2**24, 2**28),
)


def sizes_on(device: torch.device) -> Sizes:
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def measure_machine(
    cluster: Cluster,
    device: torch.device,
    *,
    precisions: tuple[str, ...] = ("fp32",),
    budget_s: float = 0.08,
    report: ProgressReport = unwatched,
) -> MachineMeasurement:
    """Measure `cluster`, this machine, from inside an initialised process group of all its devices.

    Every rank returns the slowest rank's figures. Each single quantity takes `budget_s` seconds. Messages and
    collectives are measured between the ranks of the group; a group of one leaves these tables empty.
    """
    sizes = sizes_on(device)
    alone = dist.get_world_size() == 1
    kernels = len(precisions) * len(sizes.matmul) + len(sizes.memory) + len(sizes.codec)
    counts = rank_counts(dist.get_world_size())
    messages = 0 if alone else len(sizes.message)
    reductions = len(counts) * len(COLLECTIVES) * len(sizes.reduce)
    counted = CountedWork(report, "this machine", kernels + STEPS + messages + reductions, "parts")
    launch = _together(_launches(device), budget_s)
    clock = KernelClock(device, launch.seconds)
    matmul = {
        name: tuple(
            _matmul_speed(size, PRECISIONS[name], clock, budget_s) for size in counted.each(sizes.matmul)
        )
        for name in precisions
    }
    memory = tuple(memory_speed(size, clock, budget_s) for size in counted.each(sizes.memory))
    encode, decode = zip(
        *(codec_seconds(size, clock, budget_s) for size in counted.each(sizes.codec)), strict=True
    )
    interference = measure_interference(cluster, device, counted.each)
    message = [] if alone else messages_between((0, 1), device, counted.each(sizes.message))
    return MachineMeasurement(
        device=cluster.groups[0].device.name,
        matmul=matmul,
        memory=memory,
        launch_s=launch.seconds,
        instruction_s=interference.instruction_s,
        compute_slowdown=interference.compute_slowdown,
        communication_slowdown=interference.communication_slowdown,
        message=tuple((float(size), seconds) for size, seconds in message),
        collectives=measure_collectives(counts, device, sizes.reduce, counted.each),
        spread=launch.spread,
        encode=encode,
        decode=decode,
    )


class KernelClock:
    """Measures kernels of a device, each with one launch by the host.

    A CPU's call returns when its kernel has ended. On an accelerator, events around `LAUNCHES` kernels in a
    row give the time of one. The host does not wait. The launch is added.
    """

    def __init__(self, device: torch.device, launch_s: float) -> None:
        self.device = device
        self._launch_s = launch_s
        self._accelerator = accelerator_of(device)

    def seconds(self, call: Callable[[], object]) -> float:
        if self._accelerator is None:
            return host_seconds(call)
        start, end = self._accelerator.event(), self._accelerator.event()
        start.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / LAUNCHES + self._launch_s


def _together(measure: Callable[[], float], budget_s: float) -> Timing:
    """Repeat a measurement on all ranks at the same time; return the slowest rank's."""
    dist.barrier()
    return slowest(repeat(measure, budget_s=budget_s))


def _matmul_speed(size: int, dtype: torch.dtype, clock: KernelClock, budget_s: float) -> tuple[float, float]:
    left = torch.ones(size, size, dtype=dtype, device=clock.device)
    out = torch.empty_like(left)
    timing = _together(lambda: clock.seconds(lambda: torch.mm(left, left, out=out)), budget_s)
    flops = 2.0 * size**3
    return flops, flops / timing.seconds


def memory_speed(size: int, clock: KernelClock, budget_s: float) -> tuple[float, float]:
    """Return (bytes, bytes per second) of a kernel that reads and writes `size` bytes together."""
    source = torch.ones(size // 8, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    timing = _together(lambda: clock.seconds(lambda: torch.add(source, 1.0, out=target)), budget_s)
    return float(size), size / timing.seconds


def codec_seconds(
    values: int, clock: KernelClock, budget_s: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (values, seconds) to encode gradients as SDP4Bit sends them between nodes, and to decode."""
    codec, key = Quantiser(bits=4, group=128, smooth=True), Key.of(0, "measure")
    source = torch.linspace(-1.0, 1.0, values, device=clock.device)
    payload = torch.empty(codec.payload_bytes(values), dtype=torch.uint8, device=clock.device)
    encode = _together(lambda: clock.seconds(lambda: codec.encode(source, payload, key)), budget_s)
    decode = _together(lambda: clock.seconds(lambda: codec.decode(payload, source)), budget_s)
    return (float(values), encode.seconds), (float(values), decode.seconds)


def _launches(device: torch.device) -> Callable[[], float]:
    """Return a measurement of the host's seconds to launch one kernel, while the device is behind."""
    small, launches = torch.ones(1, device=device), 1 if device.type == "cpu" else LAUNCHES

    def measure() -> float:
        seconds = host_seconds(lambda: [small.add_(1.0) for _ in range(launches)])
        finish(device)
        return seconds / launches

    return measure


def messages_between(
    pair: tuple[int, int], device: torch.device, sizes: Iterable[int]
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of messages between two ranks; all ranks call it and get the result."""
    return [(size, slowest(timing).seconds) for size, timing in messages_at_once([pair], device, sizes)]


def messages_at_once(
    pairs: Sequence[tuple[int, int]], device: torch.device, sizes: Iterable[int]
) -> list[tuple[int, Timing]]:
    """Time messages in all pairs at once; all ranks call it, and no rank is in two pairs.

    Returns:
        (bytes, half of a round trip) between this rank and its peer; zeros for a rank without a peer.
    """
    rank = dist.get_rank()
    pair = next((pair for pair in pairs if rank in pair), None)
    ways = [] if pair is None else [pair, pair[::-1]]
    with closing(open_exchange(ways, device, f"messages {pairs}")) as exchange:
        return [(size, _message_timing(exchange, size, device, pair)) for size in sizes]


def _message_timing(
    exchange: Exchange, size: int, device: torch.device, pair: tuple[int, int] | None
) -> Timing:
    seconds = []
    dist.barrier()
    if pair is not None:
        first = dist.get_rank() == pair[0]
        peer = pair[1] if first else pair[0]
        tensor = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
        with closing(MessageLine(exchange, peer, peer, tensor)) as line:
            for _ in range(MESSAGE_ROUNDS):
                start = time.perf_counter()
                if first:
                    line.send()
                line.receive().wait()
                if not first:
                    line.send()
                seconds.append((time.perf_counter() - start) / 2.0)
    dist.barrier()
    return summarise(seconds[2:]) if seconds else Timing(0.0, 0.0)
