"""Graphs of operators of any size, made by a seed: what `benchmarks/placement.py` places.

An operator multiplies a matrix of `ROWS` samples by weights, or only moves its data. It takes as long as its
operations at half of a device's peak or its bytes at the memory's rate, and 5 us to launch. A step has it
forwards and backwards: three times the operations, two transfers of each tensor, and weights, gradients and
two states of 4 bytes. Device numbers are data sheets': A100 and V100 behind PCI Express 4.0 x16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.planning.placement.graph import Devices, OperatorGraph

ROWS = 4096
# (operations per second at half of the peak in 16 bits, bytes per second of the memory).
A100, V100 = (156e12, 1.55e12), (62.5e12, 0.9e12)
LAUNCH_S, LATENCY_S, BYTES_PER_S = 5e-6, 10e-6, 25e9


@dataclass
class Drawn:
    """Operators one after the other, each with a matrix (inputs, outputs) or none, and whom it reads."""

    names: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def add(self, name: str, width: int, *read: int, multiplies: bool = False) -> int:
        """Add an operator that makes `width` values of each row, and return its number."""
        number = len(self.names)
        taken = sum(self.widths[one] for one in read) or width
        self.names.append(f"{name}_{number}")
        self.widths.append(width)
        self.inputs.append(taken)
        self.weights.append(taken * width if multiplies else 0)
        self.reads += [(one, number) for one in sorted(set(read))]
        return number

    def graph(self, kinds: Sequence[tuple[float, float]], rows: int = ROWS) -> OperatorGraph:
        """Return the graph with times in ns on devices of these kinds."""
        weights, values = np.array(self.weights, dtype=np.float64), np.array(self.widths, dtype=np.float64)
        operations = 6.0 * rows * weights
        moved = 6.0 * (rows * (values + np.array(self.inputs)) + weights)
        seconds = [np.maximum(operations / rate, moved / memory) + 2 * LAUNCH_S for rate, memory in kinds]
        reads = np.array(self.reads, dtype=np.int64).reshape(-1, 2)
        makers, tensor = np.unique(reads[:, 0], return_inverse=True)
        return OperatorGraph(
            names=self.names,
            ticks=np.rint(np.stack(seconds, axis=1) * 1e9).astype(np.int64),
            permanent_bytes=(16.0 * weights + 2.0 * rows * values).astype(np.int64),
            temporary_bytes=(2.0 * rows * values).astype(np.int64),
            producer=makers,
            tensor_bytes=(2.0 * rows * values[makers]).astype(np.int64),
            reads=np.stack([tensor, reads[:, 1]], axis=1),
            groups=np.arange(len(self.names)),
        )


def devices_of(count: int, memory_bytes: float, bytes_per_s: float = BYTES_PER_S) -> Devices:
    """Return devices with this memory each; a tensor goes forwards and its gradient back."""
    shape = (count, count)
    return Devices(
        memory_bytes=np.full(count, int(memory_bytes)),
        latency_ticks=np.full(shape, 2 * LATENCY_S * 1e9),
        ticks_per_byte=np.full(shape, 2 * 1e9 / bytes_per_s),
    )


def layered(count: int, seed: int = 0) -> Drawn:
    """Layers of 16 operators, which read one to three of the 32 before their layer."""
    random, made = np.random.default_rng(seed), Drawn()
    for number in range(count):
        layer = number - number % 16
        low = max(0, layer - 32)
        read = random.integers(low, layer, size=random.integers(1, 4)).tolist() if layer else []
        width = int(2 ** random.integers(7, 11))
        made.add("operator", width, *set(read), multiplies=bool(random.random() < 0.7))
    return made


def inception(count: int, seed: int = 0) -> Drawn:
    """Modules of four branches of one to four convolutions with their activations, put together again."""
    random, made = np.random.default_rng(seed), Drawn()
    last = made.add("input", 256)
    while len(made.names) < count:
        ends = []
        for convolutions in (1, 2, 3, 4):
            end = last
            for _ in range(convolutions):
                width = int(random.integers(4, 17)) * 64
                end = made.add("convolution", width, end, multiplies=True)
                end = made.add("norm", width, end)
                end = made.add("relu", width, end)
            ends.append(end)
        together = made.add("concat", sum(made.widths[end] for end in ends), *ends)
        last = made.add("reduce", 256, together, multiplies=True)
    return made


def chain(count: int, seed: int = 0) -> Drawn:
    """Linear layers of one width, each followed by an activation."""
    made = Drawn()
    last = made.add("input", 2048)
    while len(made.names) < count:
        last = made.add("linear", 2048, last, multiplies=True)
        last = made.add("relu", 2048, last)
    return made


def _residual(made: Drawn, last: int, width: int) -> int:
    hidden = made.add("linear", 4 * width, made.add("norm", width, last), multiplies=True)
    narrow = made.add("linear", width, made.add("gelu", 4 * width, hidden), multiplies=True)
    return made.add("add", width, last, narrow)


def towers(count: int, seed: int = 0) -> Drawn:
    """Two towers of residual blocks, one of half the width, and one layer that reads both."""
    made = Drawn()
    ends = [made.add("input", width) for width in (1024, 512)]
    while len(made.names) < count:
        ends = [_residual(made, end, made.widths[end]) for end in ends]
    made.add("both", 512, *ends, multiplies=True)
    return made


def _attention(made: Drawn, last: int, memory: int, width: int) -> int:
    normed = made.add("norm", width, last)
    source = normed if memory == last else memory
    query = made.add("query", width, normed, multiplies=True)
    key, value = (made.add(one, width, source, multiplies=True) for one in ("key", "value"))
    mixed = made.add("attention", width, query, key, value)
    return made.add("add", width, last, made.add("output", width, mixed, multiplies=True))


def encoder_decoder(count: int, seed: int = 0) -> Drawn:
    """A Transformer with as many layers in its encoder as in its decoder, of width 1024."""
    made, width = Drawn(), 1024
    layers = max(1, round(count / 28))
    encoded = made.add("source", width)
    for _ in range(layers):
        encoded = _residual(made, _attention(made, encoded, encoded, width), width)
    last = made.add("target", width)
    for _ in range(layers):
        last = _attention(made, last, last, width)
        last = _residual(made, _attention(made, last, encoded, width), width)
    made.add("vocabulary", 8192, last, multiplies=True)
    return made


def sparse(count: int, seed: int = 0) -> Drawn:
    """Operators that read up to two of all before them."""
    random, made = np.random.default_rng(seed), Drawn()
    for number in range(count):
        read = random.integers(0, number, size=random.integers(0, 3)).tolist() if number else []
        made.add("operator", int(2 ** random.integers(8, 12)), *set(read), multiplies=True)
    return made


GRAPHS: dict[str, Callable[[int, int], Drawn]] = {
    "layered": layered,
    "inception": inception,
    "chain": chain,
    "two towers": towers,
    "encoder-decoder": encoder_decoder,
}
