"""Messages between ranks over their own TCP connections, first in, first out per peer and payload.

A large message blocks its stream's thread in the system call. A small one uses no thread: a handover between
threads takes longer than the message. The sender writes it at once, and its reader reads it on demand. So in
a Timeline it ends when it is read. Both ends tell small from large by the number of bytes, and each size has
its own connection. All messages go through host memory; see `weft.run.transport.host_group`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

import torch

from weft.errors import RunError
from weft.run.streams import Completion, Ended, Reports, Stream, Value
from weft.run.transport.connections import Connections, connect, receive_into, send_all, send_now
from weft.run.transport.device_group import DeviceGroup
from weft.run.transport.host_group import bring_back, host_room
from weft.run.work_queue import labelled

# The payloads of messages.
ACTIVATION, OUTPUT_GRADIENT = "activation", "output_gradient"
PAYLOADS = (ACTIVATION, OUTPUT_GRADIENT)
_OF_SENDS = {"send_activation": ACTIVATION, "send_gradient": OUTPUT_GRADIENT}

SMALL_BYTES = 64 * 1024


def payload_of(send: str) -> str:
    """Return the payload of the messages that a kind of instruction sends."""
    return _OF_SENDS.get(send, send.removeprefix("send_"))


class Incoming(Protocol):
    """The receiving end of messages of one payload and size from one peer."""

    def receive(self, stream: Stream, label: str, tensor: torch.Tensor) -> Completion:
        """Fill a contiguous tensor with the next message, on that stream or when a thread waits for it."""
        ...


class Channels:
    """All messages of one rank."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._outboxes: dict[tuple[int, str], Outbox] = {}
        self._inboxes: dict[tuple[int, str], Incoming] = {}

    def outgoing(self, peer: int, payload: str, size_bytes: int) -> Outbox:
        """Return the outbox of messages of that size to the peer."""
        key = (peer, _connection_name(payload, size_bytes))
        if key not in self._outboxes:
            name = f"send of {payload} to rank {peer}"
            self._outboxes[key] = Outbox(self._connections[key], name, small=size_bytes <= SMALL_BYTES)
        return self._outboxes[key]

    def incoming(self, peer: int, payload: str, size_bytes: int) -> Incoming:
        """Return the inbox of messages of that size from the peer."""
        key = (peer, _connection_name(payload, size_bytes))
        if key not in self._inboxes:
            kind = SmallInbox if size_bytes <= SMALL_BYTES else Inbox
            self._inboxes[key] = kind(self._connections[key], f"receive of {payload} from rank {peer}")
        return self._inboxes[key]

    @property
    def groups(self) -> Collection[DeviceGroup]:
        return ()

    def hang_up(self) -> None:
        """Let all messages under way fail; any thread may call it."""
        for connection in list(self._connections.values()):
            # The other end may have closed it.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; the streams of the messages must be closed before."""
        for connection in self._connections.values():
            connection.close()
        self._outboxes.clear()
        self._inboxes.clear()
        self._connections.clear()


def open_channels(peers: Collection[int], timeout_s: float, payloads: Collection[str] = PAYLOADS) -> Channels:
    """Open channels of these payloads to these ranks; every rank of the job's process group calls this.

    Raises:
        InputError, RunError: as `weft.run.transport.connections.connect`.
    """
    names = [f"{size} {payload}" for size in ("small", "large") for payload in payloads]
    return Channels(connect(peers, names, timeout_s))


class Outbox:
    """Sends over one connection: at once as far as possible, the rest on the message's stream."""

    def __init__(self, connection: socket.socket, name: str, *, small: bool) -> None:
        self._connection = connection
        self._name = name
        self._small = small
        self._last: Completion | None = None

    def send(self, stream: Stream, label: str, value: Value[torch.Tensor]) -> Completion:
        """Send a tensor, which must not change before the end of the message.

        Raises:
            RunError: when the peer is already gone.
        """
        if self._small and value.completion.times is not None and self._free():
            content = _bytes_of(value.content)
            begin_ns = time.monotonic_ns()
            sent = self._send_now(label, content)
            if sent == len(content):
                return Ended.at((begin_ns, time.monotonic_ns()))
            rest = content[sent:]
            self._last = stream.run(label, lambda: self._send_all(label, rest), value)
        else:
            self._last = stream.run(label, lambda: self._send_all(label, _bytes_of(value.content)), value)
        return self._last

    def _free(self) -> bool:
        """Return True if all earlier messages are sent."""
        return self._last is None or self._last.times is not None

    def _send_now(self, label: str, content: memoryview) -> int:
        try:
            return send_now(self._connection, content)
        except OSError as error:
            raise labelled(error, label, self._name) from error

    def _send_all(self, label: str, content: memoryview) -> None:
        try:
            send_all(self._connection, content)
        except OSError as error:
            raise labelled(error, label, self._name) from error


class Inbox:
    """Large messages of one connection: the thread of their stream reads them in order."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name

    def receive(self, stream: Stream, label: str, tensor: torch.Tensor) -> Completion:
        return stream.run(label, lambda: _read(self._connection, tensor, label, self._name))


class SmallInbox:
    """Small messages of one connection: a waiting thread reads its message, after all earlier ones."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self._free_ns = 0
        self._failure: RunError | None = None
        self._unread: deque[Letter] = deque()
        # Enter the lock itself: to enter a condition runs Python code, too slow for small messages.
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._reading = False

    def receive(self, stream: Stream, label: str, tensor: torch.Tensor) -> Completion:
        letter = Letter(self, tensor, label)
        self._unread.append(letter)
        return letter

    def read(self, wanted: Letter) -> None:
        """Read up to `wanted`; after a failure no later message can be read.

        If another thread is reading, wait for `wanted`: it may come before that thread's own letter.
        """
        while wanted.times is None:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                if self._reading:
                    self._turn.wait()
                    continue
                self._reading = True
                letter = self._unread.popleft()
            try:
                self._open(letter)
            except RunError as error:
                self._failure = error
            finally:
                with self._lock:
                    self._reading = False
                    self._turn.notify_all()

    def _open(self, letter: Letter) -> None:
        _read(self._connection, letter.tensor, letter.label, self._name)
        start_ns, self._free_ns = max(letter.posted_ns, self._free_ns), time.monotonic_ns()
        letter.end((start_ns, self._free_ns))


class Letter(Reports):
    """A small message; it ends when a thread that waits for it, or for a later one, has read it."""

    def __init__(self, inbox: SmallInbox, tensor: torch.Tensor, label: str) -> None:
        super().__init__()
        self.inbox = inbox
        self.tensor = tensor
        self.label = label
        self.posted_ns = time.monotonic_ns()

    def wait(self) -> None:
        if self.times is None:
            self.inbox.read(self)


def _connection_name(payload: str, size_bytes: int) -> str:
    return f"{'small' if size_bytes <= SMALL_BYTES else 'large'} {payload}"


def _read(connection: socket.socket, tensor: torch.Tensor, label: str, name: str) -> None:
    on_host = host_room(tensor)
    try:
        receive_into(connection, _bytes_of(on_host))
    except OSError as error:
        raise labelled(error, label, name) from error
    bring_back(tensor, on_host)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.to("cpu").contiguous()
    return tensor.view(-1).view(torch.uint8).numpy().data
