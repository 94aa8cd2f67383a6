"""Messages of one size to one rank and from one rank, as the runtime sends them, without a Program."""

from __future__ import annotations

import torch

from weft.run.streams import Completion, Value
from weft.run.transport.channels import ACTIVATION, Channels, Incoming, Outbox
from weft.run.work_queue import WorkQueue


class MessageLine:
    """A line for tensors like `pattern` in both directions, first in first out; close it before the channels.

    Args:
        target, source: the ranks to send to and to receive from.
    """

    def __init__(self, channels: Channels, target: int, source: int, pattern: torch.Tensor) -> None:
        self._pattern = pattern
        self._outbox: Outbox = channels.outgoing(target, ACTIVATION, pattern.nbytes)
        self._inbox: Incoming = channels.incoming(source, ACTIVATION, pattern.nbytes)
        self._streams = (WorkQueue("messages out"), WorkQueue("messages in"))

    def send(self) -> Completion:
        return self._outbox.send(self._streams[0], "send", Value.of(self._pattern))

    def receive(self) -> Completion:
        return self._inbox.receive(self._streams[1], "receive", torch.empty_like(self._pattern))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
