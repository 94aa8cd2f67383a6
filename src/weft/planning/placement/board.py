"""`Board`: what is placed so far, when devices and channels are free, and what memory is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.describe.one_line import one_line
from weft.describe.units import format_bytes
from weft.errors import InputError, Violation
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.program.arrays import Ints

UNPLACED = -1


class Transfer(NamedTuple):
    """One tensor on its way from its producer's device to another, in ticks."""

    tensor: int
    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The device, start and end of every operator of one step.

    Attributes:
        device: shape (operators,).
        start, end: in ticks, shape (operators,).
        sequence: the operators in the order in which they were placed: each behind those that it reads, and
            rising in `start` on each device.
        transfers: each tensor at most once for each device that reads it.
        peak_bytes: of each device: what stays, what arrives, and the largest temporary, shape (devices,).
    """

    device: Ints
    start: Ints
    end: Ints
    sequence: Ints
    transfers: tuple[Transfer, ...]
    peak_bytes: Ints

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.device)} operators in {self.makespan} ticks")

    @property
    def makespan(self) -> int:
        """The end of the last operator; 0 without operators."""
        return int(self.end.max(initial=0))

    def order(self, device: int) -> Ints:
        """Return the operators of a device in the order in which they run."""
        found: Ints = self.sequence[self.device[self.sequence] == device]
        return found


class Board:
    """The state of a list scheduler: it places one operator after the other and forgets none.

    Memory is that of a training step: what an operator keeps stays, and so does what arrives. The first
    placed member of a group reserves the bytes of all, so that the others fit.
    """

    def __init__(self, graph: OperatorGraph, devices: Devices) -> None:
        count, places = graph.operators, devices.count
        self.graph, self.devices = graph, devices
        self._count, self._read = places, graph.tensors_read
        self.device = [UNPLACED] * count
        self.start, self.end = [0] * count, [0] * count
        self.free_at = [0] * places
        self.sequence: list[int] = []
        self.transfers: list[Transfer] = []
        self.group_device: dict[int, int] = {}
        self._groups: list[int] = graph.groups.tolist()
        self._ticks: list[list[int]] = graph.ticks.tolist()
        self._producer: list[int] = graph.producer.tolist()
        self._tensor_bytes: list[int] = graph.tensor_bytes.tolist()
        self._permanent, self._temporary = _of_groups(graph)
        self._memory: list[int] = devices.memory_bytes.tolist()
        self._latency: list[list[float]] = devices.latency_ticks.tolist()
        self._per_byte: list[list[float]] = devices.ticks_per_byte.tolist()
        links = enumerate(zip(self._latency, self._per_byte, strict=True))
        self._alike = [_alike_links(source, *own) for source, own in links]
        self._held, self._largest = [0] * places, [0] * places
        self._arrived: dict[int, int] = {}
        read = np.zeros(count, dtype=np.int64)
        np.add.at(read, graph.reads[:, 1], graph.tensor_bytes[graph.reads[:, 0]])
        self._read_bytes: list[int] = read.tolist()
        self._most_temporary = max(self._temporary.values(), default=0)
        self._most_bytes = max(self._permanent.values(), default=0) + max(self._read_bytes, default=0)
        self._queues = devices.communication != "parallel"
        self._ends = _channels_of(devices)
        # When each channel is free.
        self._channels: dict[int, int] = {}

    def ticks_of(self, operator: int, device: int) -> int:
        """Return the time of an operator on a device."""
        return self._ticks[operator][device]

    def pinned(self, operator: int) -> int:
        """Return the device of an operator's group; `UNPLACED` if no member is placed."""
        return self.group_device.get(self._groups[operator], UNPLACED)

    def missing_bytes(self, operator: int, device: int) -> int:
        """Return the bytes that a device lacks for an operator, its group and its inputs; 0 if it fits."""
        group = self._groups[operator]
        own = 0 if group in self.group_device else self._permanent[group]
        left = self._memory[device] - self._held[device] - own
        left -= max(self._largest[device], self._temporary[group])
        if left >= self._read_bytes[operator]:
            return 0
        return max(0, self._incoming_bytes(operator, device) - left)

    def has_room_for_any(self, device: int) -> bool:
        """Return True if a device has room for any operator; False if one of them may lack memory there."""
        left = self._memory[device] - self._held[device] - self._most_temporary
        return left >= self._most_bytes

    def ready_at(self, operator: int, device: int) -> int:
        """Return the tick at which all that an operator reads is on a device; its producers are placed."""
        if self._queues:
            return self._send(operator, device, None)
        latest, count = 0, self._count
        for tensor in self._read[operator]:
            made = self._producer[tensor]
            source, at = self.device[made], self.end[made]
            if source != device:
                known = self._arrived.get(tensor * count + device)
                at = at + self._transfer_ticks(tensor, source, device) if known is None else known
            latest = max(latest, at)
        return latest

    def ready_everywhere(self, operator: int) -> list[int]:
        """Return `ready_at` for every device."""
        if self._queues:
            return [self.ready_at(operator, device) for device in range(self._count)]
        latest = [0] * self._count
        for tensor in self._read[operator]:
            made, size = self._producer[tensor], self._tensor_bytes[tensor]
            source, at = self.device[made], self.end[made]
            for devices, latency, per_byte in self._alike[source]:
                arrival = at + round(latency + size * per_byte)
                for device in devices:
                    if arrival > latest[device]:
                        latest[device] = arrival
            if at > latest[source]:
                latest[source] = at
        return latest

    def place(self, operator: int, device: int, start: int | None = None) -> list[int]:
        """Place an operator on a device, behind all that is there without `start`.

        Returns:
            The tensors sent for it.
        """
        self.reserve(operator, device)
        sent: list[int] = []
        arrival = self._send(operator, device, sent)
        for tensor in sent:
            self._held[device] += self._tensor_bytes[tensor]
        free = self.free_at[device]
        start = max(arrival, free) if start is None else start
        end = start + self._ticks[operator][device]
        self.device[operator], self.start[operator], self.end[operator] = device, start, end
        self.free_at[device] = max(free, end)
        self.sequence.append(operator)
        return sent

    def reserve(self, operator: int, device: int) -> None:
        """Hold the bytes of an operator's group on a device, unless a member has reserved them."""
        group = self._groups[operator]
        if group not in self.group_device:
            self.group_device[group] = device
            self._held[device] += self._permanent[group]
            self._largest[device] = max(self._largest[device], self._temporary[group])

    def placement(self) -> Placement:
        """Return the finished placement."""
        return Placement(
            device=np.array(self.device, dtype=np.int64),
            start=np.array(self.start, dtype=np.int64),
            end=np.array(self.end, dtype=np.int64),
            sequence=np.array(self.sequence, dtype=np.int64),
            transfers=tuple(self.transfers),
            peak_bytes=np.array(self._held, dtype=np.int64) + np.array(self._largest, dtype=np.int64),
        )

    def refuse(self, operator: int, home: int = UNPLACED) -> InputError:
        """Return the error of an operator that fits on no device that it may have; `home`: its only one."""
        home = max(home, self.pinned(operator))
        allowed = range(self.devices.count) if home == UNPLACED else [home]
        lacks = {device: self.missing_bytes(operator, device) for device in allowed}
        best = min(lacks, key=lambda device: lacks[device])
        name, free = self.graph.names[operator], self._memory[best] - self._held[best] - self._largest[best]
        where = (
            f"fits on no device: device {best} lacks least,"
            if home == UNPLACED
            else f"must be on device {best}, which lacks"
        )
        amounts = f"{format_bytes(lacks[best])}, and has {format_bytes(max(free, 0))} left"
        problem = f"operator {name!r} {where} {amounts}"
        return InputError(Violation("placement", problem))

    def _incoming_bytes(self, operator: int, device: int) -> int:
        total, count = 0, self._count
        for tensor in self._read[operator]:
            source = self.device[self._producer[tensor]]
            if source != device and tensor * count + device not in self._arrived:
                total += self._tensor_bytes[tensor]
        return total

    def _send(self, operator: int, device: int, sent: list[int] | None) -> int:
        """Return the arrival of an operator's last tensor; record transfers if `sent` is given."""
        latest, count = 0, self._count
        # A question leaves channels as they are, but its own transfers wait for each other.
        channels = self._channels
        taken = channels if sent is not None else dict[int, int]()
        for tensor in self._read[operator]:
            made = self._producer[tensor]
            source, at = self.device[made], self.end[made]
            if source != device:
                key = tensor * count + device
                known = self._arrived.get(key)
                if known is None:
                    begin = at
                    took = self._transfer_ticks(tensor, source, device)
                    if self._queues:
                        ends = self._ends[source * count + device]
                        for end in ends:
                            begin = max(begin, channels.get(end, 0), taken.get(end, 0))
                        for end in ends:
                            taken[end] = begin + took
                    at = begin + took
                    if sent is not None:
                        self._arrived[key] = at
                        self.transfers.append(Transfer(tensor, source, device, begin, at))
                        sent.append(tensor)
                else:
                    at = known
            if at > latest:
                latest = at
        return latest

    def _transfer_ticks(self, tensor: int, source: int, target: int) -> int:
        per_byte, size = self._per_byte[source][target], self._tensor_bytes[tensor]
        return round(self._latency[source][target] + size * per_byte)


def _of_groups(graph: OperatorGraph) -> tuple[dict[int, int], dict[int, int]]:
    """Return the permanent bytes of each group together, and the largest temporary bytes of a member."""
    permanent: dict[int, int] = {}
    temporary: dict[int, int] = {}
    columns = (graph.groups.tolist(), graph.permanent_bytes.tolist(), graph.temporary_bytes.tolist())
    for group, kept, taken in zip(*columns, strict=True):
        permanent[group] = permanent.get(group, 0) + kept
        temporary[group] = max(temporary.get(group, 0), taken)
    return permanent, temporary


def _alike_links(
    source: int, latency: list[float], per_byte: list[float]
) -> list[tuple[list[int], float, float]]:
    """Return the latencies and times per byte of the links from a device, each with the devices behind it."""
    found: dict[tuple[float, float], list[int]] = {}
    for device, link in enumerate(zip(latency, per_byte, strict=True)):
        if device != source:
            found.setdefault(link, []).append(device)
    return [(devices, *link) for link, devices in found.items()]


def _channels_of(devices: Devices) -> list[tuple[int, ...]]:
    """Return the channels that a transfer from each device to each holds, sources first."""
    places = range(devices.count)
    if devices.communication == "links":
        return [(source * devices.count + target,) for source in places for target in places]
    return [(source, target) for source in places for target in places]
