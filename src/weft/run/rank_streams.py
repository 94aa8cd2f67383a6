"""Streams of a rank: one that computes, and threads that communicate with other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from weft.program.program import NONE, Instruction
from weft.run.accelerator import accelerator_of
from weft.run.device_streams import ComputeStream, CopyQueue
from weft.run.streams import Ended, Stream, Value
from weft.run.work_queue import WorkQueue

COMPUTE, COLLECTIVE = "compute", "collective"


class HostStream:
    """The issuing thread itself computes: `run` returns after the work has ended, and raises its errors."""

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Ended:
        for value in reads:
            if value.completion.times is None:
                value.completion.wait()
        start_ns = time.monotonic_ns()
        work()
        ended = Ended()
        ended.times = (start_ns, time.monotonic_ns())
        return ended


class RankStreams:
    """One stream for computations; one thread for collectives, and one per peer and kind of message.

    A thread starts with its first work: messages may need none.
    """

    def __init__(self, compute: Stream, queue: Callable[[str], WorkQueue]) -> None:
        self._compute = compute
        self._queue = queue
        self._queues: dict[tuple[str, int], WorkQueue] = {}

    def of(self, instruction: Instruction) -> Stream:
        kind = instruction.kind
        if kind.stream == COMPUTE:
            return self._compute
        peer = NONE if kind.collective else instruction.peer
        key = (kind.stream, peer)
        if key not in self._queues:
            self._queues[key] = self._queue(_name(kind.stream, peer))
        return self._queues[key]

    def close(self) -> None:
        for stream in self._queues.values():
            stream.close()
        self._queues.clear()


def open_streams(device: torch.device) -> RankStreams:
    """Return the streams of a rank that computes on this device."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return RankStreams(HostStream(), WorkQueue)
    return RankStreams(ComputeStream(accelerator), lambda name: CopyQueue(name, accelerator))


def _name(stream: str, peer: int) -> str:
    """Return the stream's name in error messages."""
    if stream == COLLECTIVE:
        return "reduction"
    return stream.replace("_", " ") + ("" if peer == NONE else f" of rank {peer}")
