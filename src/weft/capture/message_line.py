"""Messages of one size to one rank and from one rank, as the runtime sends them, without a Program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

import torch

from weft.run.rank_streams import RankStreams, open_streams
from weft.run.runtime import TIMEOUT_S
from weft.run.streams import Completion, Value
from weft.run.transport.channels import ACTIVATION
from weft.run.transport.transports import RankMessages, transport_of


@dataclass(frozen=True)
class Exchange:
    """The messages of a measurement, and streams for them."""

    messages: RankMessages
    streams: RankStreams

    def close(self) -> None:
        self.streams.close()
        self.messages.close()


def open_exchange(ways: Collection[tuple[int, int]], device: torch.device, name: str) -> Exchange:
    """Open messages by the transport of a run on such devices; every rank of the job calls it.

    Args:
        ways: (sender, receiver) of the messages that begin or end at this rank.
        name: new in this job.
    """
    transport = transport_of(None, device)
    ends = [(sender, receiver, ACTIVATION) for sender, receiver in ways]
    messages = transport.open_messages(ends, name, timedelta(seconds=TIMEOUT_S))
    return Exchange(messages, open_streams(device, exchanges_in_kernels=transport.in_kernels))


class MessageLine:
    """A line for tensors like `pattern` in both directions, first in first out; close it before its exchange.

    Args:
        target, source: the ranks to send to and to receive from.
    """

    def __init__(self, exchange: Exchange, target: int, source: int, pattern: torch.Tensor) -> None:
        self._pattern = pattern
        self._outbox = exchange.messages.outgoing(target, ACTIVATION, pattern.nbytes)
        self._inbox = exchange.messages.incoming(source, ACTIVATION, pattern.nbytes)
        open_stream = exchange.streams.open_stream
        self._streams = (open_stream("messages out"), open_stream("messages in"))

    def send(self) -> Completion:
        return self._outbox.send(self._streams[0], "send", Value.of(self._pattern))

    def receive(self) -> Completion:
        return self._inbox.receive(self._streams[1], "receive", torch.empty_like(self._pattern))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
