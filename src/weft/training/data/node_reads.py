"""`NodeReads`: each micro-batch read by one rank of a node, which hands it to the others.

Ranks of a node need the same micro-batch if they divide a layer. So do those of the first and the last stage.
The lowest of them reads. A thread for each other rank sends what it needs, in the order of the reads. If a
connection breaks, the other rank reads for itself.

Tasks that map their samples into memory need no hand-over: the ranks of a node share the pages.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from safetensors.torch import load, save

from weft.run.launch.nodes import JobNodes
from weft.run.transport.connections import connect, receive_exactly
from weft.run.workspace import Samples, inputs_of
from weft.training.coordination.agreement import gather, meeting_peers
from weft.training.data.reader import Read

# Step, global micro-batch number and bytes of the content that follows; 0 bytes: the reading rank has failed.
_HEAD = struct.Struct("!qqQ")


@dataclass(frozen=True)
class NodeNeeds:
    """The global micro-batch numbers that each rank of a node needs, seen from one of the ranks."""

    rank: int
    numbers: Mapping[int, Collection[int]]

    def reader(self, number: int) -> int:
        """Return the rank that reads a micro-batch: the lowest one that needs it."""
        return min(rank for rank, needed in self.numbers.items() if number in needed)

    @cached_property
    def takers(self) -> Mapping[int, Sequence[int]]:
        """The other ranks that need each micro-batch that this rank reads, by its number."""
        return {
            number: [rank for rank, needed in self.numbers.items() if rank != self.rank and number in needed]
            for number in self.numbers[self.rank]
            if self.reader(number) == self.rank
        }

    @cached_property
    def givers(self) -> Mapping[int, int]:
        """The rank that reads each micro-batch that this rank needs and does not read, by its number."""
        return {one: self.reader(one) for one in self.numbers[self.rank] if one not in self.takers}

    @property
    def peers(self) -> set[int]:
        """The ranks that this one gives micro-batches to, or takes them from."""
        return {rank for takers in self.takers.values() for rank in takers} | {*self.givers.values()}


@dataclass
class NodeReads:
    """A `Read` that asks the task only for micro-batches that this rank reads; as a context manager it ends.

    Attributes:
        lines: connections to the peers of `needs`; without any, ranks read from memory that they share.
        read_bytes: of the tensors of all micro-batches that this rank has read for its node.
    """

    read: Read
    needs: NodeNeeds
    lines: Mapping[int, socket.socket]
    read_bytes: int = 0

    def __post_init__(self) -> None:
        self._arrived: dict[tuple[int, int], Samples] = {}
        # A thread each: a rank that is slow to take delays no other. A pool without work has none.
        self._senders = {
            rank: ThreadPoolExecutor(1, thread_name_prefix="weft-samples") for rank in self.lines
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines.values():
            _hang_up(line)
        for sender in self._senders.values():
            sender.shutdown(cancel_futures=True)
        for line in self.lines.values():
            line.close()

    def __call__(self, step: int, number: int) -> Samples:
        """Return a micro-batch; one thread calls it, in the order of the steps."""
        giver = self.needs.givers.get(number)
        if giver is not None:
            if giver not in self.lines:
                return self.read(step, number)
            given = self._taken(self.lines[giver], step, number)
            return self._own(step, number) if given is None else given
        takers = [rank for rank in self.needs.takers[number] if rank in self._senders]
        content = b""
        try:
            samples = self._own(step, number)
            content = packed(samples) if takers else b""
        finally:
            for rank in takers:
                self._give(rank, step, number, content)
        return samples

    def _own(self, step: int, number: int) -> Samples:
        samples = self.read(step, number)
        self.read_bytes += sum(one.nbytes for one in (*inputs_of(samples[0]), samples[1]))
        return samples

    def _give(self, rank: int, step: int, number: int, content: bytes) -> None:
        head = _HEAD.pack(step, number, len(content))
        with suppress(RuntimeError):  # the pool has ended
            self._senders[rank].submit(_send, self.lines[rank], head, content)

    def _taken(self, line: socket.socket, step: int, number: int) -> Samples | None:
        """Return a micro-batch that another rank has read; None if that rank has failed or is gone."""
        try:
            while (step, number) not in self._arrived:
                *place, size = _HEAD.unpack(receive_exactly(line, _HEAD.size))
                content = receive_exactly(line, size)
                if not size:
                    return None
                self._arrived[place[0], place[1]] = unpacked(content)
        except OSError:
            return None
        return self._arrived.pop((step, number))


def open_node_reads(
    read: Read,
    numbers: Collection[int],
    nodes: JobNodes,
    *,
    hands_over: bool,
    timeout_s: float,
) -> NodeReads:
    """Agree on the ranks that read, and connect those of this node if they hand over; every rank calls it.

    Args:
        numbers: the global micro-batch numbers that this rank needs.
        timeout_s: the seconds to wait for a connection.

    Raises:
        PeerLostError: if a rank is gone.
        RunError: if a rank of the node did not connect.
    """
    needed = gather(sorted(numbers))
    own_node = next(ranks for ranks in nodes.nodes if nodes.rank in ranks)
    needs = NodeNeeds(nodes.rank, {rank: frozenset(needed[rank]) for rank in own_node})
    if not hands_over:
        return NodeReads(read, needs, {})
    with meeting_peers():
        # A rank may take nothing for as long as a step, a checkpoint or an evaluation lasts.
        lines = connect(needs.peers, ["samples"], timeout_s, endless=True)
    return NodeReads(read, needs, {rank: line for (rank, _), line in lines.items()})


def packed(samples: Samples) -> bytes:
    """Return a micro-batch as bytes, without any code that a pickle could hold."""
    inputs, targets, *rest = samples
    named = {f"input {place}": one for place, one in enumerate(inputs_of(inputs))}
    if isinstance(inputs, torch.Tensor):
        named = {"input": inputs}
    for lengths in rest:
        named |= {f"lengths {place}": torch.tensor(row) for place, row in enumerate(lengths)}
    # Views of one storage are refused.
    return save({name: one.clone() for name, one in {**named, "targets": targets}.items()})


def unpacked(content: bytes) -> Samples:
    """Return the micro-batch that `packed` has packed."""
    named = load(content)
    inputs, lengths = _numbered(named, "input"), _numbered(named, "lengths")
    pair = named["input"] if "input" in named else tuple(inputs), named["targets"]
    return (*pair, [row.tolist() for row in lengths]) if lengths else pair


def _numbered(named: Mapping[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    count = sum(one.startswith(f"{name} ") for one in named)
    return [named[f"{name} {place}"] for place in range(count)]


def _send(line: socket.socket, head: bytes, content: bytes) -> None:
    try:
        line.sendall(head)
        line.sendall(content)
    except OSError:
        # The other rank is gone, or this one ends; the first reads for itself.
        _hang_up(line)


def _hang_up(line: socket.socket) -> None:
    """End a connection for the threads of both ends that wait in it."""
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
