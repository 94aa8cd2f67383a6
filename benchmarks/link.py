"""A link between two ranks of a process group, as they find it: for predictions of what they do over it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.describe.cluster import Link

PROBE_BYTES, PROBES = 2**20, 5


@dataclass(frozen=True, slots=True)
class Measured:
    """A link as two ranks found it, and the raw times of empty and of large messages."""

    link: Link
    empty_s: tuple[float, ...]
    large_s: tuple[float, ...]


def measured_link(
    rank: int, peer: int, typical: Callable[[Sequence[float]], float] = statistics.median
) -> Measured:
    """Half a round trip of an empty message, and the bandwidth of a large one; every rank gets the answer.

    `typical` chooses from the times of equal messages.
    """
    empty = [seconds / 2 for seconds in _exchanges_s(rank, peer, 1)]
    latency_s = typical(empty)
    large = [seconds - latency_s for seconds in _exchanges_s(rank, peer, PROBE_BYTES)]
    figures = torch.tensor([*empty, *large], dtype=torch.float64)
    dist.broadcast(figures, rank)
    empty_s, large_s = figures[:PROBES].tolist(), figures[PROBES:].tolist()
    # The large message's own latency is not bandwidth's.
    moving_s = typical(large_s) - typical(empty_s)
    return Measured(Link(PROBE_BYTES / moving_s, typical(empty_s)), tuple(empty_s), tuple(large_s))


def _exchanges_s(rank: int, peer: int, there_bytes: int) -> list[float]:
    """Seconds until each message's empty answer is back, the first left out; the other ranks wait."""
    there, back = torch.zeros(there_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    seconds = []
    dist.barrier()
    for _ in range(PROBES + 1):
        began = time.perf_counter()
        if dist.get_rank() == rank:
            dist.send(there, peer)
            dist.recv(back, peer)
        elif dist.get_rank() == peer:
            dist.recv(there, rank)
            dist.send(back, rank)
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return seconds[1:]


def words_of(measured: Measured) -> str:
    """The bandwidth, the latency, and the times behind them."""

    def listed(times: tuple[float, ...], unit: float) -> str:
        return " ".join(f"{time * unit:.1f}" for time in times)

    link = measured.link
    return (
        f"{link.bytes_per_s / 1e6:.2f} MB/s, {link.latency_s * 1e6:.0f} us "
        f"(empty messages: {listed(measured.empty_s, 1e6)} us; "
        f"of {PROBE_BYTES / 2**20:g} MiB: {listed(measured.large_s, 1e3)} ms)"
    )
