"""One GPU: the times that decide how many steps work in bubbles takes, block by block, for several widths.

By width of a BERT block: its forward and backward passes (T_f, T_b) in bf16, the products of a micro-batch's
rows (T_curv), the inverses (T_inv) and the use of inverses (T_prec) in fp32. The ratio is that of a 1F1B
pipeline of 4 stages with 4 micro-batches: (T_inv + 4 T_curv) over the idle time of a step. A window has at
least so many steps. Then come the plain operations of `benchmarks/curvature.py`.

    python benchmarks/gpu/curvature_parts.py
    python benchmarks/gpu/curvature_parts.py --tiny   # on a CPU: shows that the script runs, and nothing else
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from curvature import DAMPING, ROWS, SEED, SIZES, figures_of, least_seconds, measured
from figures import Value
from harness import Report, parser

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.methods.kfac.linears import LinearLayers, treated_in
from weft.methods.kfac.runtime.factors import DampedInverse
from weft.run.stage.build import build_stage

STAGES, MICRO_BATCHES = 4, 4


@dataclass(frozen=True)
class Scale:
    """What is measured: widths of blocks, the samples and tokens of a micro-batch, and sizes of factors."""

    device: str
    widths: tuple[int, ...]
    samples: int
    sequence: int
    sizes: tuple[int, ...]
    rounds: int


LARGE = Scale("cuda", (768, 1024, 2048, 4096), 32, 128, SIZES, 20)
TINY = Scale("cpu", (64, 128), 2, 16, (64,), 2)


def block_of(width: int, sequence: int) -> ModelConfig:
    """A model with one block of BERT of this width."""
    base = resolve_model("bert-base", sequence=sequence)
    heads = max(1, width // 64)
    return replace(
        base,
        name=f"bert of {width}",
        layers=1,
        hidden=width,
        heads=heads,
        key_value_heads=heads,
        feed_forward=4 * width,
    )


def passes_of(config: ModelConfig, scale: Scale) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward pass of a block, and both passes."""
    stage = build_stage(config, [1], SEED, torch.bfloat16).to(scale.device)
    shape = (scale.samples, scale.sequence, config.hidden)
    inputs = torch.randn(shape, device=scale.device, dtype=torch.bfloat16, requires_grad=True)

    def both() -> None:
        stage(inputs).sum().backward()
        stage.zero_grad()
        inputs.grad = None

    return lambda: stage(inputs), both


def work_of(linears: LinearLayers, rows: int, device: str) -> Sequence[Callable[[], object]]:
    """The products of a micro-batch, the inverses, and the use of inverses, of a block."""
    sides = [
        [DampedInverse(size, torch.float32, torch.device(device)) for size in linears.sizes(side)]
        for side in (0, 1)
    ]
    factors = [*sides[0], *sides[1]]
    captured = [torch.randn(rows, len(one.sum), device=device, dtype=torch.bfloat16) for one in factors]
    for factor, one in zip(factors, captured, strict=True):
        factor.add(one, 1.0 / rows)
        factor.complete()
    sums = [one.sum.clone() for one in factors]
    outputs = iter(sides[1])
    pairs = [
        (next(outputs), inner)
        for operand, inner in zip(linears.operands, sides[0], strict=True)
        for _ in operand.columns
    ]
    gradients = [torch.randn(len(outer.sum), len(inner.sum), device=device) for outer, inner in pairs]

    def products() -> None:
        for factor, one in zip(factors, captured, strict=True):
            factor.add(one, 1.0 / rows)

    def inverses() -> None:
        for factor, one in zip(factors, sums, strict=True):
            factor.sum.copy_(one)
            factor.begun.fill_(1)
            assert factor.invert(DAMPING, factor.mean)

    def uses() -> None:
        for (outer, inner), gradient in zip(pairs, gradients, strict=True):
            gradient.copy_(DampedInverse.multiplied(gradient, outer.used, inner.used, DAMPING))

    return products, inverses, uses


def block_figures(width: int, scale: Scale) -> dict[str, Value]:
    config = block_of(width, scale.sequence)
    work = work_of(treated_in(config)[1], scale.samples * scale.sequence, scale.device)
    calls = [*passes_of(config, scale), *work]
    forward, both, product, inverse, use = least_seconds(calls, scale.rounds, 1, scale.device)
    # Both passes of each micro-batch take the time of the slots of 1F1B; the others are idle.
    idle = (STAGES - 1) * both
    return {
        "forward": Value(forward, "s"),
        "backward": Value(both - forward, "s"),
        "products": Value(product, "s"),
        "inverses": Value(inverse, "s"),
        "use": Value(use, "s"),
        "work over idle time": Value((inverse + MICRO_BATCHES * product) / idle, "ratio"),
    }


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    return made


def main() -> int:
    asked = options().parse_args()
    report, scale = Report("gpu_curvature", asked), TINY if asked.tiny else LARGE
    if scale.device == "cuda" and not torch.cuda.is_available():
        report.say("no CUDA device: nothing was measured")
        return 0
    report.print_machine()
    torch.set_num_threads(1)
    for width in scale.widths:
        cell = f"block of {width}, {scale.samples} x {scale.sequence} tokens, {scale.device}"
        if report.missing(cell):
            report.add_cell(cell, block_figures(width, scale))
    for size in scale.sizes:
        cell = f"{size} features, {ROWS} rows, fp32, {scale.device}"
        if report.missing(cell):
            report.add_cell(cell, figures_of(measured(size, ROWS, scale.rounds, scale.device)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
