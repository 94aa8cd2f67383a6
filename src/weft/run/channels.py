"""Messages between ranks over TCP connections of their own, first in, first out per peer and payload.

Large messages have a thread per (peer, direction, payload), which blocks in the system call and stamps the
time of arrival. Small ones do without: to hand them over between threads takes longer than to send them. The
sender writes them at once, and whoever needs one reads it, so that in a Timeline it ends when it is read.
Both ends tell small from large by the number of bytes, and each size has a connection of its own.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

from weft.errors import RunError
from weft.run.connections import Connections, connect, receive_into, send_all, send_now
from weft.run.work_queue import Done, Handle, Job, Promise, Stamp, WorkQueue, transfer_error

# What messages carry.
ACTIVATION, OUTPUT_GRADIENT = "activation", "output_gradient"
PAYLOADS = (ACTIVATION, OUTPUT_GRADIENT)

SMALL_BYTES = 64 * 1024


class Channels:
    """All messages of one rank; one thread calls `send`, `receive` and the `wait` of what they return."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._outboxes: dict[tuple[int, str], Outbox] = {}
        self._inboxes: dict[tuple[int, str], Inbox | SmallInbox] = {}

    def send(self, tensor: torch.Tensor, peer: int, payload: str, label: str, stamp: Stamp) -> Handle:
        """Send a contiguous tensor in host memory, which must not change until the handle is done.

        Raises:
            RunError: when the peer is gone already.
        """
        key = (peer, _connection_name(payload, tensor.nbytes))
        if key not in self._outboxes:
            self._outboxes[key] = Outbox(self._connections[key], f"send of {payload} to rank {peer}")
        return self._outboxes[key].send(tensor, label, stamp)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, payload: str, label: str, stamp: Stamp
    ) -> Handle:
        """Receive a tensor of that shape."""
        tensor = torch.empty(shape, dtype=dtype)
        key = (peer, _connection_name(payload, tensor.nbytes))
        if key not in self._inboxes:
            kind = SmallInbox if tensor.nbytes <= SMALL_BYTES else Inbox
            self._inboxes[key] = kind(self._connections[key], f"receive of {payload} from rank {peer}")
        return self._inboxes[key].receive(tensor, label, stamp)

    def close(self) -> None:
        """Finish what is under way and hang up."""
        for box in (*self._outboxes.values(), *self._inboxes.values()):
            box.close()
        for connection in self._connections.values():
            connection.close()
        self._outboxes.clear()
        self._inboxes.clear()
        self._connections.clear()


def open_channels(peers: Collection[int], timeout_s: float) -> Channels:
    """Channels to these ranks; every rank of the job's process group calls this.

    Raises:
        InputError, RunError: as `weft.run.connections.connect`.
    """
    names = [f"{size} {payload}" for size in ("small", "large") for payload in PAYLOADS]
    return Channels(connect(peers, names, timeout_s))


class Outbox:
    """Sends over one connection: at once what it takes at once, the rest from a thread."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self._queue: WorkQueue | None = None

    def send(self, tensor: torch.Tensor, label: str, stamp: Stamp) -> Handle:
        content = _bytes_of(tensor)
        if len(content) <= SMALL_BYTES and (self._queue is None or self._queue.idle):
            begin_ns = time.monotonic_ns()
            try:
                sent = send_now(self._connection, content)
            except OSError as error:
                raise transfer_error(label, self._name, error) from error
            if sent == len(content):
                stamp(begin_ns, time.monotonic_ns())
                return Done(tensor)
            content = content[sent:]

        def transfer() -> torch.Tensor:
            send_all(self._connection, content)
            return tensor

        if self._queue is None:
            self._queue = WorkQueue(self._name)
        return self._queue.put(Job(Promise(label), transfer, stamp))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


class Inbox:
    """Large messages of one connection: a thread reads them one after the other."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._queue = WorkQueue(name)

    def receive(self, tensor: torch.Tensor, label: str, stamp: Stamp) -> Handle:
        room = _bytes_of(tensor)

        def transfer() -> torch.Tensor:
            receive_into(self._connection, room)
            return tensor

        return self._queue.put(Job(Promise(label), transfer, stamp))

    def close(self) -> None:
        self._queue.close()


class SmallInbox:
    """Small messages of one connection: whoever needs one reads it, after all that come before it."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self._free_ns = 0
        self._failure: RunError | None = None
        self._unread: deque[Letter] = deque()

    def receive(self, tensor: torch.Tensor, label: str, stamp: Stamp) -> Handle:
        letter = Letter(self, tensor, label, stamp, time.monotonic_ns())
        self._unread.append(letter)
        return letter

    def read(self, wanted: Letter) -> None:
        """Read up to `wanted`; nothing behind a failure can be trusted to arrive."""
        if self._failure is not None:
            raise self._failure
        while not wanted.opened:
            letter = self._unread.popleft()
            try:
                receive_into(self._connection, _bytes_of(letter.tensor))
            except OSError as error:
                self._failure = transfer_error(letter.label, self._name, error)
                raise self._failure from error
            letter.opened = True
            start_ns, self._free_ns = max(letter.posted_ns, self._free_ns), time.monotonic_ns()
            letter.stamp(start_ns, self._free_ns)

    def close(self) -> None:
        self._unread.clear()


@dataclass(slots=True)
class Letter:
    """A small message; the thread that computes waits for it and nobody else."""

    inbox: SmallInbox
    tensor: torch.Tensor
    label: str
    stamp: Stamp
    posted_ns: int
    opened: bool = False

    def wait(self) -> torch.Tensor:
        if not self.opened:
            self.inbox.read(self)
        return self.tensor


def _connection_name(payload: str, size_bytes: int) -> str:
    return f"{'small' if size_bytes <= SMALL_BYTES else 'large'} {payload}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
