"""Calculon's closed form (Isaev et al., SC 2023) for GPT blocks on A100, nothing overlapped, written out.

A product takes its flops by the peak times the efficiency of that many flops, everything else its bytes by
the bandwidth times the efficiency of that many bytes; both efficiencies are steps. Collectives are rings
without latency, messages between stages are free. Calculon knows neither embeddings nor logits. How many
operations of which size a block has is counted as weft counts it, for that is not part of what is compared.
"""

from __future__ import annotations

from typing import NamedTuple

# (more than so many flops or bytes, share of the peak or of the bandwidth).
MATRIX_STEPS = ((0.0, 0.1), (1e9, 0.6), (16e9, 0.9), (128e9, 0.95))
MEMORY_STEPS = ((0.0, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9))
PEAK = 312e12
MEMORY = 2039e9


class Case(NamedTuple):
    """Sizes of the model, of a micro-batch of `b` samples, and of the layout; `link` in bytes/s."""

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
    link: float


def efficiency(size: float, steps: tuple[tuple[float, float], ...]) -> float:
    return [share for least, share in steps if size > least][-1]


def matrix_s(flops: float) -> float:
    return flops / (PEAK * efficiency(flops, MATRIX_STEPS))


def memory_s(moved: float) -> float:
    return moved / (MEMORY * efficiency(moved, MEMORY_STEPS))


def several_s(moved: float, kernels: int) -> float:
    return kernels * memory_s(moved / kernels)


def ring_s(size: float, ranks: int, link: float) -> float:
    return 2 * (ranks - 1) / ranks * size / link


def parameters(case: Case) -> float:
    """Of a block, on one tensor rank: matrices and divided biases; norms and the two whole biases."""
    h, f = case.h, case.f
    return (4 * h * h + 3 * h + 2 * h * f + f) / case.tp + 6 * h


def block_s(case: Case) -> tuple[float, float]:
    """Forward and backward of a micro-batch through one block, in 16 bits."""
    h, f, s, b, tp = case.h, case.f, case.s, case.b, case.tp
    weights = [2 * b * s * h * columns / tp for columns in (3 * h, h, f, f)]
    attention = [2 * b * case.heads / tp * s * s * (h // case.heads)] * 2
    elements = b * s * (2 * 2 + 2 * 3) * h / tp + b * s * 2 * f / tp
    exchanged = 2 * ring_s(2 * b * s * h, tp, case.link)
    forward = sum(matrix_s(one) for one in (*weights, *attention)) + several_s(2 * elements, 5) + exchanged
    inputs = sum(matrix_s(one) for one in (*weights, *attention, *attention)) + several_s(4 * elements, 10)
    gradients = sum(matrix_s(one) for one in weights) + several_s(2 * 3 * parameters(case), 4)
    again = forward if case.recompute else 0.0
    return forward, again + inputs + gradients + exchanged


def step_s(case: Case) -> float:
    """Of interleaved 1F1B: the bubble is a loop's part of the stages before; then gradients, then Adam."""
    forward, backward = block_s(case)
    stage_s = case.blocks / case.pp * (forward + backward)
    pipeline_s = (case.micro_batches + (case.pp - 1) / case.loops) * stage_s
    held = case.blocks / case.pp
    reduced_s = ring_s(4 * held * parameters(case), case.dp, case.link)
    # Gradients are read; weights, their fp32 copies and both moments are read and written.
    return pipeline_s + reduced_s + held * memory_s((4 + 2 * (2 + 12)) * parameters(case))
