"""An accelerator that is late: every stream is a thread, which takes a seeded time before each kernel.

It overwrites memory that is given away, so a kernel that reads it too late or too early finds no number.

Tests launch kernels with `launch`: plain functions, which run later, as those of a device do.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch

from weft.run.device_streams import DeviceWork, KernelStream
from weft.run.state.shards import GatheredWeights
from weft.run.streams import Completion, Value
from weft.run.transport.transports import DeviceTransport

MOST_LATE_S = 1e-3
LIMIT_S = 60.0
FREE = GatheredWeights.free


class LateStream:
    """A thread that runs kernels in order; within its context it is the caller's current stream."""

    def __init__(self, accelerator: LateAccelerator, seed: int) -> None:
        self._accelerator = accelerator
        self._draw = random.Random(seed)
        self._kernels: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self, kernel: Callable[[], object]) -> None:
        self._kernels.put(kernel)

    def synchronize(self) -> None:
        done = threading.Event()
        self.launch(done.set)
        assert done.wait(LIMIT_S)

    def __enter__(self) -> Self:
        self._before = self._accelerator.current
        self._accelerator.local.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accelerator.local.stream = self._before

    def _serve(self) -> None:
        while True:
            kernel = self._kernels.get()
            time.sleep(self._draw.choice((0.0, self._draw.uniform(0.0, MOST_LATE_S))))
            kernel()


class LateEvent:
    """A place in a stream; it may be recorded again once it is reached."""

    def __init__(self, accelerator: LateAccelerator) -> None:
        self._accelerator = accelerator
        self._reached = threading.Event()
        self.reached_ns = 0

    def record(self) -> None:
        reached = self._reached = threading.Event()

        def reach() -> None:
            self.reached_ns = time.monotonic_ns()
            reached.set()

        self._accelerator.launch(reach)

    def wait(self) -> None:
        reached = self._reached
        self._accelerator.launch(lambda: reached.wait(LIMIT_S))

    def synchronize(self) -> None:
        assert self._reached.wait(LIMIT_S)
        if self._accelerator.broken:
            raise RuntimeError("an illegal memory access")

    def query(self) -> bool:
        return self._reached.is_set()

    def elapsed_time(self, later: LateEvent) -> float:
        return (later.reached_ns - self.reached_ns) / 1e6


class LateAccelerator:
    """The device: `broken` makes its kernels fail, as the host learns when it waits."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self.local = threading.local()
        self.broken = False
        self.default = self.stream()

    @property
    def current(self) -> LateStream:
        return getattr(self.local, "stream", self.default)

    def launch(self, kernel: Callable[[], object]) -> None:
        """Give the current stream a kernel."""
        self.current.launch(kernel)

    def stream(self) -> LateStream:
        return LateStream(self, self._draw.randrange(2**32))

    def event(self) -> LateEvent:
        return LateEvent(self)


class LateKernelStream(KernelStream):
    """A stream whose work runs as a kernel: when the device gets to it, not when the host launches it.

    Here a kernel is a Python function, which holds what it reads. On a device nothing but the stream's record
    of the work does. A value of another stream that the record has dropped is overwritten before the kernel
    reads it, as if the allocator had given its memory away.
    """

    def run(
        self, label: str, work: Callable[[], None], *reads: Value[Any], order: object = None
    ) -> Completion:
        others = [value for value in reads if not self._made(value.completion)]
        returned, launched = threading.Event(), list[Completion]()

        def kernel() -> None:
            # The host holds the values until then.
            assert returned.wait(LIMIT_S)
            kept = {id(value) for one in launched if isinstance(one, DeviceWork) for value in one._kept}
            for value in others:
                if id(value) not in kept:
                    poison(value.content)
            work()

        try:
            launched.append(super().run(label, lambda: self._accelerator.launch(kernel), *reads, order=order))
        finally:
            returned.set()
        return launched[0]


def poison(content: object) -> None:
    """Overwrite the floating tensors of a value, or of a tuple or list."""
    if isinstance(content, torch.Tensor) and content.is_floating_point():
        content.data.fill_(torch.nan)
    elif isinstance(content, tuple | list):
        for one in content:
            poison(one)


def free_poisoned(weights: GatheredWeights) -> None:
    """Free the room of a stage's weights, which nothing may read before the next gather."""
    FREE(weights)
    poison(weights._room)


@contextmanager
def late_device(seed: int, *, kernels: bool, exchanges: bool | None = None) -> Iterator[LateAccelerator]:
    """Runtimes made in this block compute on one; with `kernels`, all work runs when the device gets to it.

    With `exchanges`, by default as `kernels`, gloo exchanges in kernels, too, as NCCL does in those of a GPU.
    """
    accelerator = LateAccelerator(seed)

    def in_kernels(name: str | None, device: torch.device) -> DeviceTransport:
        transport = DeviceTransport(device.type)
        transport.in_kernels = True
        return transport

    with ExitStack() as patched:
        patched.enter_context(patch("weft.run.rank_streams.accelerator_of", lambda device: accelerator))
        if kernels:
            patched.enter_context(patch("weft.run.rank_streams.KernelStream", LateKernelStream))
            patched.enter_context(patch.object(GatheredWeights, "free", free_poisoned))
        if kernels if exchanges is None else exchanges:
            patched.enter_context(patch("weft.run.resources.transport_of", in_kernels))
        yield accelerator
