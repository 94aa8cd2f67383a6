"""`OperatorGraph` and `Devices`: the operators of one step and their devices, in plain numbers.

Times are whole ticks, so that equal times are equal. A tick is whatever the caller counts, mostly 1 ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Literal

import numpy as np

from weft.describe.one_line import one_line
from weft.errors import InputError, Violation
from weft.program.arrays import Floats, Ints

# Who shares a channel: nobody, all transfers of a device, all transfers from one device to another.
Communication = Literal["parallel", "sequential", "links"]


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """Operators in a topological order, and the tensors that they read from each other.

    Attributes:
        names: of the operators, for messages.
        ticks: time of each operator on each device, at least 1, shape (operators, devices).
        permanent_bytes: bytes that an operator takes on its device to the end of the step: weights with their
            gradients and states, and activations for its backward pass, shape (operators,).
        temporary_bytes: bytes that it takes beside them while it runs, in either pass, shape (operators,).
        producer: the operator that makes each tensor, shape (tensors,).
        tensor_bytes: shape (tensors,).
        reads: rows (tensor, operator that reads it), each once, shape (reads, 2).
        groups: the number of an operator's group, whose members share a device; shape (operators,).
    """

    names: Sequence[str]
    ticks: Ints
    permanent_bytes: Ints
    temporary_bytes: Ints
    producer: Ints
    tensor_bytes: Ints
    reads: Ints
    groups: Ints

    def __post_init__(self) -> None:
        count = len(self.ticks)
        problems = []
        columns = (self.names, self.permanent_bytes, self.temporary_bytes, self.groups)
        if {len(column) for column in columns} != {count}:
            problems.append(Violation("operator graph", f"columns of other lengths than {count} operators"))
        if count and self.ticks.min() < 1:
            first = int(np.flatnonzero(self.ticks.min(axis=1) < 1)[0])
            problems.append(
                Violation(
                    "operator graph", f"operator {self.names[first]!r} takes no time; at least 1 tick", "1"
                )
            )
        if len(self.reads):
            made, reader = self.producer[self.reads[:, 0]], self.reads[:, 1]
            wrong = np.flatnonzero((made >= reader) | (reader >= count))
            if len(wrong):
                pair = self.reads[wrong[0]].tolist()
                problems.append(
                    Violation("operator graph", f"read {pair} must be by an operator behind the producer")
                )
        if problems:
            raise InputError(problems)

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.ticks)} operators, {len(self.producer)} tensors")

    @property
    def operators(self) -> int:
        return len(self.ticks)

    @cached_property
    def edges(self) -> Ints:
        """Pairs (producer, reader) of operators, each once, sorted; shape (edges, 2)."""
        pairs = np.stack([self.producer[self.reads[:, 0]], self.reads[:, 1]], axis=1)
        keys = np.unique(pairs[:, 0] * self.operators + pairs[:, 1])
        return np.stack([keys // max(self.operators, 1), keys % max(self.operators, 1)], axis=1)

    @cached_property
    def tensors_read(self) -> list[list[int]]:
        """For each operator, the tensors that it reads, rising."""
        return lists_of(self.reads[:, 1], self.reads[:, 0], self.operators)

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each tensor, the operators that read it, rising."""
        return lists_of(self.reads[:, 0], self.reads[:, 1], len(self.producer))

    @cached_property
    def successors(self) -> list[list[int]]:
        """For each operator, those that read its tensors, rising."""
        return lists_of(self.edges[:, 0], self.edges[:, 1], self.operators)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """For each operator, those whose tensors it reads, rising."""
        return lists_of(self.edges[:, 1], self.edges[:, 0], self.operators)

    @cached_property
    def edge_bytes(self) -> Ints:
        """Bytes of the tensors on each of `edges`, shape (edges,)."""
        made, reader = self.producer[self.reads[:, 0]], self.reads[:, 1]
        keys = self.edges[:, 0] * self.operators + self.edges[:, 1]
        rows = np.searchsorted(keys, made * self.operators + reader)
        found: Ints = np.bincount(
            rows, weights=self.tensor_bytes[self.reads[:, 0]], minlength=len(self.edges)
        ).astype(np.int64)
        return found


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices with their memory, and the links between each two.

    Attributes:
        memory_bytes: shape (devices,).
        latency_ticks: of a transfer between two devices, shape (devices, devices).
        ticks_per_byte: the same shape.
        communication: `parallel` transfers never wait for each other. With `sequential` a device takes part
            in one at a time; with `links`, one at a time goes from a device to another.
    """

    memory_bytes: Ints
    latency_ticks: Floats
    ticks_per_byte: Floats
    communication: Communication = "parallel"

    def __post_init__(self) -> None:
        if not self.count:
            raise InputError(Violation("devices", "0 devices; at least 1 is needed", "1"))

    @property
    def count(self) -> int:
        return len(self.memory_bytes)

    @cached_property
    def least_latency_ticks(self) -> float:
        return float(self._of_pairs(self.latency_ticks).min(initial=np.inf)) if self.count > 1 else 0.0

    @cached_property
    def least_ticks_per_byte(self) -> float:
        return float(self._of_pairs(self.ticks_per_byte).min(initial=np.inf)) if self.count > 1 else 0.0

    @cached_property
    def mean_transfer_ticks(self) -> tuple[float, float]:
        """Latency and ticks per byte of all links on average."""
        if self.count == 1:
            return 0.0, 0.0
        return (
            float(self._of_pairs(self.latency_ticks).mean()),
            float(self._of_pairs(self.ticks_per_byte).mean()),
        )

    def _of_pairs(self, table: Floats) -> Floats:
        """Return the entries of a table between different devices."""
        found: Floats = table[~np.eye(self.count, dtype=np.bool_)]
        return found

    @property
    def are_alike(self) -> bool:
        """True if all devices have equal memory and all links are equal."""
        tables = (self._of_pairs(self.latency_ticks), self._of_pairs(self.ticks_per_byte))
        return len(np.unique(self.memory_bytes)) == 1 and all(len(np.unique(one)) <= 1 for one in tables)

    def least_transfer_ticks(self, size_bytes: Ints) -> Ints:
        """Return the ticks that transfers of these bytes take over the fastest link, elementwise."""
        found: Ints = np.rint(self.least_latency_ticks + size_bytes * self.least_ticks_per_byte).astype(
            np.int64
        )
        return found


def lists_of(keys: Ints, values: Ints, count: int) -> list[list[int]]:
    """Return, for each key below `count`, its values, rising."""
    rows = np.lexsort([values, keys])
    bounds = np.searchsorted(keys[rows], np.arange(count + 1))
    ordered: list[int] = values[rows].tolist()
    return [ordered[first:end] for first, end in pairwise(bounds.tolist())]


def topological_order(count: int, edges: Ints, keys: Ints | Floats) -> Ints:
    """Return nodes behind all that they read; of those that may come next, the one with the least key."""
    edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)
    missing = np.bincount(edges[:, 1], minlength=count).tolist()
    readers = lists_of(edges[:, 0], edges[:, 1], count)
    key = keys.tolist()
    ready = [(key[node], node) for node in range(count) if not missing[node]]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, (key[reader], reader))
    return np.array(order, dtype=np.int64)
