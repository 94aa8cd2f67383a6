"""Streams of a rank: one that computes, and threads that communicate with other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from weft.errors import InputError, Violation
from weft.program.kinds import CODEC
from weft.program.program import NONE, Instruction
from weft.program.rank_program import RankProgram
from weft.run.accelerator import accelerator_of
from weft.run.device_streams import CopyQueue, DeviceClock, KernelStream
from weft.run.program_order import ProgramOrder
from weft.run.streams import Ended, Stream, Value
from weft.run.work_queue import WorkQueue

COMPUTE, COLLECTIVE = "compute", "collective"
# Copies between a device and its host, and codecs of messages, meet no other rank.
ALONE = ("copy out", "copy in", CODEC)
_COMPUTATION = (COMPUTE, NONE)
# Of a CUDA device at most; see `weft.run.launch.worker_start`.
HARDWARE_QUEUES = 32
# The streams of computations and of the clock, and those of `SideStreams`.
_OTHERS = 5


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


class ClosableStream(Stream, Protocol):
    """A stream of a rank's messages or collectives."""

    def close(self) -> None:
        """Finish the work under way and end what does it."""
        ...


class SideStreams(NamedTuple):
    """The streams of work that no instruction names; see `weft.run.streams.Streams`."""

    loading: ClosableStream
    reading: ClosableStream
    copying: ClosableStream


class RankStreams:
    """One stream for computations, one for collectives, and one per peer and kind of message.

    Args:
        compute: the stream of computations.
        open_stream: makes a stream of that name for messages or collectives, at the first work of each:
            messages may need none.
        sides: the streams of work that no instruction names; None for that of computations.
    """

    def __init__(
        self,
        compute: Stream,
        open_stream: Callable[[str], ClosableStream],
        sides: SideStreams | None = None,
    ) -> None:
        self._compute = compute
        self._sides = sides
        self.open_stream = open_stream
        self._others: dict[tuple[str, int], ClosableStream] = {}

    @property
    def loading(self) -> Stream | None:
        return None if self._sides is None else self._sides.loading

    @property
    def reading(self) -> Stream:
        return self._compute if self._sides is None else self._sides.reading

    @property
    def copying(self) -> Stream:
        return self._compute if self._sides is None else self._sides.copying

    def of(self, instruction: Instruction) -> Stream:
        key = _key(instruction)
        if key == _COMPUTATION:
            return self._compute
        if key not in self._others:
            self._others[key] = self.open_stream(_name(*key))
        return self._others[key]

    def order(self, program: RankProgram) -> ProgramOrder | None:
        return ProgramOrder(program) if isinstance(self._compute, KernelStream) else None

    def notice(self) -> int:
        device = [
            one for one in (self._compute, *self._others.copy().values()) if isinstance(one, KernelStream)
        ]
        for stream in device:
            stream.notice()
        return max((stream.clock.error_ns for stream in device), default=0)

    def close(self) -> None:
        for stream in self._others.values():
            stream.close()
        self._others.clear()
        for side in self._sides or ():
            side.close()


def open_streams(device: torch.device, *, exchanges_in_kernels: bool) -> RankStreams:
    """Return the streams of a rank that computes on this device.

    `exchanges_in_kernels` states that messages and collectives are kernels of the device.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        return RankStreams(HostStream(), WorkQueue)
    clock = DeviceClock(accelerator)
    compute = KernelStream("computation", accelerator, clock)

    def following(name: str) -> KernelStream:
        return KernelStream(name, accelerator, clock, accelerator.stream(), after=compute)

    def open_stream(name: str) -> ClosableStream:
        if exchanges_in_kernels or name in ALONE:
            return following(name)
        return CopyQueue(name, accelerator)

    sides = SideStreams(
        loading=KernelStream("loading", accelerator, clock, accelerator.stream()),
        reading=CopyQueue("results", accelerator),
        copying=following("checkpoint"),
    )
    return RankStreams(compute, open_stream, sides)


def require_queues(program: RankProgram) -> None:
    """Refuse a program whose messages and collectives need more streams than a device runs at once.

    A kernel that waits for another rank holds up all streams of its hardware queue. The other rank may wait
    for one of these. With a queue for each stream, kernels wait as the verifier assumes.

    Raises:
        InputError: with the number of streams.
    """
    streams = {_key(one) for one in program.instructions()} - {_COMPUTATION}
    if len(streams) + _OTHERS > HARDWARE_QUEUES:
        problem = f"'device' needs {len(streams) + _OTHERS} streams; a device has {HARDWARE_QUEUES} queues"
        raise InputError(Violation("run.transport", problem, "host"))


def _key(instruction: Instruction) -> tuple[str, int]:
    """Return the name of an instruction's stream, and the peer whose messages it carries."""
    kind = instruction.kind
    return (kind.stream, NONE if kind.collective or kind.stream == COMPUTE else instruction.peer)


def _name(stream: str, peer: int) -> str:
    """Return the stream's name in error messages."""
    if stream == COLLECTIVE:
        return "reduction"
    return stream.replace("_", " ") + ("" if peer == NONE else f" of rank {peer}")
