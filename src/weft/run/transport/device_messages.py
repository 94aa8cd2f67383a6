"""Messages between ranks on tensors where they lie: a process group for each direction and payload of a pair.

A group carries the messages of one direction alone. So a message waits for earlier ones of its kind only, as
the verifier assumes.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch

from weft.program.kinds import KINDS, message_kinds
from weft.program.rank_program import RankProgram
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.channels import payload_of
from weft.run.transport.device_group import DeviceGroup

# The sender and the receiver of a group's messages, and their payload.
Way = tuple[int, int, str]


class DeviceMessages:
    """All messages of one rank; each goes through the group of its way.

    Args:
        rank: this rank.
        groups: by way, those that begin or end at this rank.
    """

    def __init__(self, rank: int, groups: dict[Way, DeviceGroup]) -> None:
        self._rank = rank
        self._groups = groups

    def outgoing(self, peer: int, payload: str, size_bytes: int) -> DeviceOutbox:
        return DeviceOutbox(self._groups[self._rank, peer, payload])

    def incoming(self, peer: int, payload: str, size_bytes: int) -> DeviceInbox:
        return DeviceInbox(self._groups[peer, self._rank, payload])

    @property
    def groups(self) -> Collection[DeviceGroup]:
        return self._groups.values()

    def hang_up(self) -> None:
        """Do nothing: groups carry all messages."""

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()


class DeviceOutbox:
    """Sends the messages of one way."""

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group

    def send(self, stream: Stream, label: str, value: Value[torch.Tensor]) -> Completion:
        """Send a tensor, which must not change before the end of the message."""
        return stream.run(label, lambda: self._group.send(value.content, 1 - self._group.place), value)


class DeviceInbox:
    """Receives the messages of one way."""

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group

    def receive(self, stream: Stream, label: str, tensor: torch.Tensor) -> Completion:
        """Fill a contiguous tensor with the next message."""
        return stream.run(label, lambda: self._group.receive(tensor, 1 - self._group.place))


def open_device_messages(
    rank: int, ways: Collection[Way], name: str, timeout: timedelta, backend: str
) -> DeviceMessages:
    """Open the groups of a rank's messages; every rank of the job calls it with the same name."""
    # All ranks open them in one order.
    groups = {
        way: DeviceGroup.open(f"{name} {' '.join(map(str, way))}", way[:2], timeout, backend)
        for way in sorted(ways)
    }
    return DeviceMessages(rank, groups)


def ways_of(program: RankProgram) -> set[Way]:
    """Return the ways of a rank's messages."""
    rank, ways = program.rank, set[Way]()
    for send, receive in message_kinds():
        payload = payload_of(KINDS[send].name)
        ways |= {(rank, peer, payload) for peer in program.peers(send)}
        ways |= {(peer, rank, payload) for peer in program.peers(receive)}
    return ways
