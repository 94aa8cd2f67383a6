"""What Calculon's program computes for GPT blocks (Isaev et al., SC 2023), written out in full.

`oracles.calculon` is its closed form over the operations that weft counts; this one counts as the program
does: a matrix product takes its flops and its bytes one after the other; forks, residuals and dropout are
operations; what tensor ranks send is read and written besides. Tensor ranks divide the tokens between
products and keep what they gather. No embeddings, no logits, nothing overlapped. Amounts in elements of two
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oracles.calculon import MATRIX_STEPS, MEMORY_STEPS, efficiency

VECTOR_STEPS = ((-1.0, 0.1), (1e9, 0.5), (16e9, 0.95))
# (factor, offset): of n ranks bytes x factor x (1 + offset / n).
INSIDE = {"p2p": (1.0, 0), "scatter": (1.5, -1), "gather": (1.5, -1), "all": (2.0, -1)}
BETWEEN = {"p2p": (1.0, 0), "scatter": (1.0, 0), "gather": (1.0, 0), "all": (1.0, 0)}


class Network(NamedTuple):
    """Bytes/s that are reached, seconds of latency, and what each kind of message costs."""

    bytes_per_s: float
    latency_s: float
    scales: dict[str, tuple[float, int]]

    def time_s(self, kind: str, size: float, ranks: int) -> float:
        factor, offset = self.scales[kind]
        return self.latency_s + size * factor * (1 + offset / ranks) / self.bytes_per_s


class Case(NamedTuple):
    """Sizes of the model, a micro-batch of `b` samples, degrees, and the networks of each kind of message."""

    blocks: int
    h: int
    heads: int
    f: int
    s: int
    b: int
    tp: int
    pp: int
    dp: int
    loops: int
    micro_batches: int
    recompute: bool
    peak: float
    memory: float
    tensor: Network
    pipeline: Network
    data: Network


class Operation(NamedTuple):
    """Flops and elements moved of the three passes; `weights` in elements, `mask` in bytes."""

    matrix: bool
    flops: tuple[float, float, float]
    moved: tuple[float, float, float]
    weights: float = 0.0
    mask: float = 0.0


def product(rows: float, inner: float, columns: float) -> Operation:
    flops = 2 * rows * inner * columns
    moved = rows * inner + rows * columns + inner * columns
    return Operation(True, (flops,) * 3, (moved,) * 3, inner * columns)


def scores(count: float, rows: float, inner: float, columns: float) -> Operation:
    flops = 2 * count * rows * inner * columns
    moved = count * (rows * inner + inner * columns + rows * columns)
    return Operation(True, (flops, 2 * flops, 0), (moved, moved, 0))


def norm(tokens: float, h: float) -> Operation:
    size = tokens * h
    return Operation(False, (9 * size, 14 * size, 7 * size), (2 * size + 2 * h,) * 3, 2 * h)


def dropout(size: float) -> Operation:
    return Operation(False, (size, size, 0), (2 * size, 2 * size, 0), mask=size)


def fork(size: float, users: int) -> Operation:
    return Operation(False, (0, users * size, 0), (0, (users + 1) * size, 0))


def pointwise(size: float, forward: float, backward: float) -> Operation:
    return Operation(False, (forward * size, backward * size, 0), (2 * size, 2 * size, 0))


def residual(size: float) -> Operation:
    return Operation(False, (size, 2 * size, 0), (3 * size, 3 * size, 0))


def exchange(case: Case, *, scatters: bool) -> Operation:
    """What tensor ranks add up and copy when they scatter in one direction and gather in the other."""
    size = case.b * case.s * case.h if case.tp > 1 else 0
    added = size * (case.tp - 1) / case.tp
    return Operation(False, (added, 0, 0) if scatters else (0, added, 0), (2 * size, 2 * size, 0))


def operations(case: Case) -> Iterator[Operation]:
    tokens, t, h = case.b * case.s, case.tp, case.h
    whole, share, heads = tokens * h, tokens // t * h, case.b * case.heads // t
    size = h // case.heads
    squares = case.heads // t * case.s**2 * case.b
    yield from (fork(share, 2), norm(tokens // t, h), fork(whole, 3))
    yield from (product(tokens, h, h // t) for _ in range(3))
    yield scores(heads, case.s, size, case.s)
    yield from (pointwise(squares, 5, 8), dropout(squares))
    yield scores(heads, case.s, case.s, size)
    yield product(tokens, h // t, h)
    yield from (dropout(share), residual(share))
    yield from (fork(share, 2), norm(tokens // t, h))
    yield product(tokens, h, case.f // t)
    yield pointwise(case.f * tokens // t, 8, 13)
    yield product(tokens, case.f // t, h)
    yield from (dropout(share), residual(share))


def time_s(case: Case, matrix: bool, flops: float, moved_bytes: float) -> float:
    peak, steps = (case.peak, MATRIX_STEPS) if matrix else (0.25 * case.peak, VECTOR_STEPS)
    computed = flops / (peak * efficiency(flops, steps)) if flops else 0.0
    moved = moved_bytes / (case.memory * efficiency(moved_bytes, MEMORY_STEPS)) if moved_bytes else 0.0
    return computed + moved


def pass_s(case: Case, one: Operation, place: int) -> float:
    masked = one.mask if place < 2 else 0.0
    return time_s(case, one.matrix, one.flops[place], 2 * one.moved[place] + masked)


class Block(NamedTuple):
    """Seconds of a micro-batch forward and backward, of the update, and bytes of weights."""

    forward_s: float
    backward_s: float
    update_s: float
    weight_bytes: float


def block(case: Case) -> Block:
    every = list(operations(case))
    forward, inputs, weights = (sum(pass_s(case, one, place) for one in every) for place in range(3))
    sent = exchanged = again = 0.0
    if case.tp > 1:
        size = 2 * case.b * case.s * case.h
        gather, scatter = (case.tensor.time_s(kind, size, case.tp) for kind in ("gather", "scatter"))
        copies = [
            [pass_s(case, exchange(case, scatters=scatters), place) for scatters in (False, True)]
            for place in range(2)
        ]
        sent = 2 * (gather + scatter + sum(copies[0]))
        exchanged = 2 * (gather + scatter + sum(copies[1]))
        again = 2 * (gather + scatter)
    return Block(
        forward_s=forward + sent,
        backward_s=inputs + weights + exchanged + (forward + again if case.recompute else 0.0),
        update_s=sum(time_s(case, False, 11 * one.weights, 12 * one.weights) for one in every),
        weight_bytes=2 * sum(one.weights for one in every),
    )


def step_s(case: Case) -> float:
    one = block(case)
    held = case.blocks // case.pp
    message_s = 0.0
    if case.pp > 1:
        message_s = case.pipeline.time_s("p2p", 2 * (case.b * case.s // case.tp * case.h), 2)
    chunk_s = held // case.loops * (one.forward_s + one.backward_s) + 2 * message_s
    reduced_s = case.data.time_s("all", one.weight_bytes, case.dp) if case.dp > 1 else 0.0
    pipeline_s = (case.micro_batches * case.loops + case.pp - 1) * chunk_s
    return pipeline_s + held * (reduced_s + one.update_s)
