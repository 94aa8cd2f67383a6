"""`Transport`: how the ranks of a runtime exchange tensors. One goes through host memory, one does not.

`host` sends messages over TCP and reduces with gloo: for CPUs, and for several ranks on one accelerator. Its
sums are in the order of the ranks. `device` gives tensors to the backend of their device where they lie: NCCL
on CUDA, gloo on a CPU. The backend chooses the order of its sums.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from weft.errors import InputError, Violation, require_choice
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.channels import PAYLOADS, Incoming, open_channels
from weft.run.transport.device_group import GLOO, NCCL, DeviceGroup
from weft.run.transport.device_messages import Way, open_device_messages
from weft.run.transport.host_group import HostGroup

HOST, DEVICE = "host", "device"
TRANSPORTS = (HOST, DEVICE)

_BACKENDS = {"cpu": GLOO, "cuda": NCCL}


class Outgoing(Protocol):
    """The sending end of messages of one payload and size to one peer."""

    def send(self, stream: Stream, label: str, value: Value[torch.Tensor]) -> Completion:
        """Send a tensor on that stream; it must not change before the end of the message."""
        ...


class RankMessages(Protocol):
    """All messages of one rank."""

    @property
    def groups(self) -> Collection[DeviceGroup]:
        """The groups that carry messages."""
        ...

    def outgoing(self, peer: int, payload: str, size_bytes: int) -> Outgoing:
        """Return the sending end of messages of that size to the peer."""
        ...

    def incoming(self, peer: int, payload: str, size_bytes: int) -> Incoming:
        """Return the receiving end of messages of that size from the peer."""
        ...

    def hang_up(self) -> None:
        """Let all messages under way on connections besides groups fail; any thread may call it."""
        ...

    def close(self) -> None:
        """Close the connections; the streams of the messages must be closed before."""
        ...


class Transport(Protocol):
    """Opens the groups and the messages of a rank.

    Attributes:
        in_kernels: True if groups and messages launch kernels of the device and do not block.
    """

    in_kernels: bool

    def open_group(self, name: str, ranks: Sequence[int], timeout: timedelta) -> DeviceGroup:
        """Open a group of these ranks, as `DeviceGroup.open`."""
        ...

    def open_messages(self, ways: Collection[Way], name: str, timeout: timedelta) -> RankMessages:
        """Open the messages of this rank on these ways; every rank of the job calls it, with one name."""
        ...


class HostTransport:
    """Exchange through host memory."""

    in_kernels = False

    def open_group(self, name: str, ranks: Sequence[int], timeout: timedelta) -> DeviceGroup:
        return HostGroup.open(name, ranks, timeout)

    def open_messages(self, ways: Collection[Way], name: str, timeout: timedelta) -> RankMessages:
        peers = {end for way in ways for end in way[:2]} - {dist.get_rank()}
        # Both ends of a pair have the payloads of its methods.
        payloads = dict.fromkeys((*PAYLOADS, *sorted(payload for _, _, payload in ways)))
        return open_channels(peers, timeout.total_seconds(), list(payloads))


class DeviceTransport:
    """Exchange by the backend of a kind of device, such as cuda.

    Raises:
        InputError: if weft knows no backend for the device, or this torch has none.
    """

    def __init__(self, device_type: str) -> None:
        backend = _BACKENDS.get(device_type)
        if backend is None or not dist.is_backend_available(backend):
            problem = f"'device' needs {backend or 'a backend'} for {device_type}, which this torch lacks"
            raise InputError(Violation("run.transport", problem, HOST))
        self.in_kernels = backend != GLOO
        self._backend = backend

    def open_group(self, name: str, ranks: Sequence[int], timeout: timedelta) -> DeviceGroup:
        return DeviceGroup.open(name, ranks, timeout, self._backend)

    def open_messages(self, ways: Collection[Way], name: str, timeout: timedelta) -> RankMessages:
        return open_device_messages(dist.get_rank(), ways, name, timeout, self._backend)


def transport_of(name: str | None, device: torch.device) -> Transport:
    """Return the transport of that name for ranks on such devices.

    Without a name it is `device` where every rank has an accelerator whose backend this torch has, else
    `host`.

    Raises:
        InputError: for another name, and as `DeviceTransport`.
    """
    backend = _BACKENDS.get(device.type, "")
    if name is None:
        name = DEVICE if backend != GLOO and dist.is_backend_available(backend) else HOST
    require_choice("transport", name, TRANSPORTS)
    return HostTransport() if name == HOST else DeviceTransport(device.type)
