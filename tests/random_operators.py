"""Random small operator graphs and devices for tests of placement, and the paper's example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from weft.planning.placement.bounds import longest_chain
from weft.planning.placement.graph import Communication, Devices, OperatorGraph
from weft.program.arrays import Ints

COMMUNICATIONS: tuple[Communication, ...] = ("parallel", "sequential", "links")
AMPLE = 10**6


def graph_of(
    ticks: Sequence[Sequence[int]] | Ints,
    tensors: Sequence[tuple[int, int, Sequence[int]]],
    permanent: Sequence[int] | None = None,
    temporary: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> OperatorGraph:
    """A graph of operators with these ticks on each device; tensors are (producer, bytes, readers)."""
    count = len(ticks)
    reads = [(number, one) for number, (_, _, readers) in enumerate(tensors) for one in sorted(set(readers))]
    zeros = [0] * count
    return OperatorGraph(
        names=[f"operator {number}" for number in range(count)],
        ticks=np.array(ticks, dtype=np.int64),
        permanent_bytes=np.array(permanent or zeros, dtype=np.int64),
        temporary_bytes=np.array(temporary or zeros, dtype=np.int64),
        producer=np.array([made for made, _, _ in tensors], dtype=np.int64),
        tensor_bytes=np.array([size for _, size, _ in tensors], dtype=np.int64),
        reads=np.array(reads, dtype=np.int64).reshape(-1, 2),
        groups=np.array(groups or range(count), dtype=np.int64),
    )


def devices_of(
    count: int,
    memory_bytes: int | Sequence[int] = AMPLE,
    *,
    latency: float = 1.0,
    per_byte: float = 0.0,
    communication: Communication = "parallel",
) -> Devices:
    """Devices with equal links."""
    shape = (count, count)
    memory = [memory_bytes] * count if isinstance(memory_bytes, int) else memory_bytes
    return Devices(
        memory_bytes=np.array(memory, dtype=np.int64),
        latency_ticks=np.full(shape, latency),
        ticks_per_byte=np.full(shape, per_byte),
        communication=communication,
    )


def paper_example(devices: int = 2) -> OperatorGraph:
    """The paper's graph 0 -> 1 -> 2 -> 3 and 0 -> 4 -> 5 -> 3, numbered in a topological order: its 4 and 5
    are 3 and 4, and its 3 is 5."""
    ticks = [[one] * devices for one in (1, 3, 3, 3, 1, 1)]
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    return graph_of(ticks, [(made, 0, [reader]) for made, reader in edges], permanent=(1, 2, 2, 1, 1, 1))


@st.composite
def operator_graphs(
    draw: st.DrawFn, *, devices: int, most: int = 12, alike: bool = False, grouped: bool = False
) -> OperatorGraph:
    """Graphs of up to `most` operators, of which devices may take unlike times."""
    count = draw(st.integers(1, most))

    def some(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    base = some(1, 9)
    speeds = [1] * devices if alike else [draw(st.integers(1, 3)) for _ in range(devices)]
    tensors = []
    if count > 1:
        for _ in range(draw(st.integers(0, 2 * count))):
            made = draw(st.integers(0, count - 2))
            readers = draw(st.sets(st.integers(made + 1, count - 1), min_size=1, max_size=3))
            tensors.append((made, draw(st.integers(0, 5)), sorted(readers)))
    return graph_of(
        [[one * speed for speed in speeds] for one in base],
        tensors,
        permanent=some(0, 6),
        temporary=some(0, 4),
        groups=some(0, count - 1) if grouped else None,
    )


@st.composite
def device_sets(draw: st.DrawFn, graph: OperatorGraph, communication: Communication = "parallel") -> Devices:
    """Unlike links between the devices of a graph, whose memory is ample or tight."""
    count = graph.ticks.shape[1]
    need = int(graph.permanent_bytes.sum() + graph.temporary_bytes.max())
    memory = AMPLE if draw(st.booleans()) else draw(st.integers(need // count, 2 * need // count + 2))

    def table() -> list[list[float]]:
        row = st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=count, max_size=count)
        return [draw(row) for _ in range(count)]

    return Devices(
        memory_bytes=np.full(count, memory),
        latency_ticks=np.array(table()),
        ticks_per_byte=np.array(table()),
        communication=communication,
    )


@st.composite
def questions(
    draw: st.DrawFn,
    *,
    most: int = 12,
    communications: Sequence[Communication] = COMMUNICATIONS,
    grouped: bool = False,
) -> tuple[OperatorGraph, Devices]:
    """A graph and up to four devices."""
    graph = draw(operator_graphs(devices=draw(st.integers(1, 4)), most=most, grouped=grouped))
    return graph, draw(device_sets(graph, draw(st.sampled_from(list(communications)))))


def scaled(graph: OperatorGraph, times: int) -> OperatorGraph:
    """The same graph with all times multiplied."""
    return replace(graph, ticks=graph.ticks * times)


def critical_path_ticks(graph: OperatorGraph, devices: Devices) -> float:
    """The longest chain with all transfers over the fastest links."""
    transfers = devices.least_transfer_ticks(graph.edge_bytes).astype(np.float64)
    return longest_chain(graph, graph.ticks.min(axis=1).astype(np.float64), transfers)
