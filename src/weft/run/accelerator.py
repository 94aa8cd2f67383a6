"""The narrow interface to an accelerator: streams of kernels, and events that mark places in them.

torch's device-agnostic classes serve every vendor. A CPU has neither streams nor events: torch raises for
them, and its kernels end before their call returns.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

# Kinds of devices with a backend for collectives (`weft.run.transport.transports`). ROCm is called cuda, too.
_SERVED = ("cuda",)


class Event(Protocol):
    """A place among the kernels of a stream."""

    def record(self) -> None:
        """Mark the place behind all kernels that the current stream has been given."""
        ...

    def wait(self) -> None:
        """Let the current stream's further kernels wait for the event; the host goes on."""
        ...

    def synchronize(self) -> None:
        """Block the host until the device has reached the event."""
        ...

    def query(self) -> bool:
        """Return True if the device has reached the event."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Return milliseconds from this event to another one, both reached."""
        ...


class DeviceStream(AbstractContextManager[Any], Protocol):
    """A queue of kernels; within its context it is the thread's current stream."""

    def synchronize(self) -> None:
        """Block the host until the device has done all kernels of the stream."""
        ...


class Accelerator(Protocol):
    """Makes the streams and events of one device."""

    def stream(self) -> DeviceStream: ...

    def event(self) -> Event: ...


class TorchAccelerator:
    """An accelerator that torch knows, through its device-agnostic streams and events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> DeviceStream:
        return torch.Stream(device=self._device)

    def event(self) -> Event:
        return torch.Event(device=self._device, enable_timing=True)


def device_count() -> int:
    """Return the number of accelerators that this process sees, of a vendor that weft serves."""
    found = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if found is not None and found.type in _SERVED else 0


def take_device(index: int) -> str:
    """Make an accelerator the process's own, before its driver starts; return its name for torch."""
    # See `weft.run.rank_streams.require_queues`.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.accelerator.set_device_index(index)
    return current_device()


def current_device() -> str:
    """Return the name for torch of the process's accelerator, or of the CPU where there is none."""
    found = torch.accelerator.current_accelerator()
    if found is None or device_count() == 0:
        return "cpu"
    return f"{found.type}:{torch.accelerator.current_device_index()}"


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator on which a device's kernels run; None for a CPU."""
    return None if device.type == "cpu" else TorchAccelerator(device)


def require_same_bits() -> None:
    """Let torch run only kernels that give the same bits in every repetition; call it before the first one.

    An operation without such a kernel then raises a RuntimeError.
    """
    # cuBLAS reads it when its first product makes a workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def finish(device: torch.device) -> None:
    """Wait until a device has done all its kernels; a CPU has done them when their calls return."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of a device.

    `torch.manual_seed` seeds those of all vendors. For those without a device, it notes the seed
    and a traceback in a list. That takes a millisecond, and the list only grows.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)


def allocated_bytes(device: torch.device) -> int | None:
    """Return the most bytes that torch has held on a device at once; None for a CPU, where nobody counts."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def forget_allocated(device: torch.device) -> None:
    """Begin `allocated_bytes` anew, with the bytes that torch holds now."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device; the host does not wait for the copy.

    torch keeps the pinned memory until the copy has ended.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
