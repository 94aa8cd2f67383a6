"""An accelerator that is late: every stream is a thread, which takes a seeded time before each kernel.

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

from weft.run.device_streams import KernelStream
from weft.run.streams import Completion, Value
from weft.run.transport.transports import DeviceTransport

MOST_LATE_S = 1e-3
LIMIT_S = 60.0


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
    """A stream whose work runs as a kernel: when the device gets to it, not when the host launches it."""

    def run(self, label: str, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        return super().run(label, lambda: self._accelerator.launch(work), *reads)


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
        if kernels if exchanges is None else exchanges:
            patched.enter_context(patch("weft.run.resources.transport_of", in_kernels))
        yield accelerator
