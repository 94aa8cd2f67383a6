"""Expert layers, forward and backward, beside each implementation of `transformers`.

A layer is a router and its experts with the same weights and tokens, on one thread or on a GPU. Rounds of all
implementations alternate, and the least seconds of each count, as others use the machine, too. The ratio is
the least of the implementations of `transformers` over ours.

    python benchmarks/experts.py                 # all cells, a minute
    python benchmarks/experts.py --quick         # the smallest
    python benchmarks/experts.py --device cuda   # in bf16, with sizes that fill a GPU
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from figures import Value
from harness import Report, parser
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from weft.run.stage.experts import IMPLEMENTATION

TARGET = 1.0
ROUNDS = 14
# Of `transformers`; its batched product reads each expert's weights once for each row.
OTHERS = ("eager", "grouped_mm")
# Hidden size, columns of an expert, experts, experts of a token, tokens.
Sizes = tuple[int, int, int, int, int]
SMALL: tuple[Sizes, ...] = ((64, 96, 8, 2, 512), (256, 512, 8, 2, 1024), (256, 128, 64, 8, 1024))
LARGE: tuple[Sizes, ...] = ((4096, 14336, 8, 2, 8192), (2048, 768, 128, 8, 16384))


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="the smallest cell alone")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the layers compute")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("experts", asked)
    report.print_machine()
    torch.set_num_threads(1)
    on_host = asked.device == "cpu"
    cells = [
        (sizes, precision)
        for sizes in (SMALL if on_host else LARGE)
        for precision in ((torch.float32, torch.bfloat16) if on_host else (torch.bfloat16,))
    ]
    for sizes, precision in cells[:1] if asked.quick else cells:
        measure(report, asked.device, sizes, precision)


def measure(
    report: Report, device: str, sizes: Sizes, precision: torch.dtype, others: Sequence[str] = OTHERS
) -> None:
    """Add the cell of a layer if it is missing; `others` are implementations of `transformers`."""
    hidden, columns, experts, active, tokens = sizes
    kind = str(precision).removeprefix("torch.")
    words = f"{active} of {experts} experts, {hidden} x {columns}, {tokens} tokens, {kind}"
    if not report.missing(words):
        return
    least = least_s(sizes, (IMPLEMENTATION, *others), device, precision)
    if without := [one for one in (IMPLEMENTATION, *others) if one not in least]:
        report.say(f"{words}: no memory for {', '.join(without)}")
    found = {name: Value(taken, "s") for name, taken in least.items()}
    theirs = [taken for name, taken in least.items() if name != IMPLEMENTATION]
    if IMPLEMENTATION in least and theirs:
        ratio = min(theirs) / least[IMPLEMENTATION]
        found["ratio"] = Value(ratio, "ratio", TARGET, met=ratio >= TARGET)
    report.add_cell(words, found)


def least_s(
    sizes: Sizes, implementations: Sequence[str], device: str, precision: torch.dtype
) -> dict[str, float]:
    """The least seconds of each implementation, in turns; those that a GPU has no memory for are left out."""
    hidden, tokens = sizes[0], sizes[-1]
    stream = torch.randn(1, tokens, hidden, device=device, dtype=precision, requires_grad=True)
    gradient = torch.randn_like(stream)
    layers = {}
    for name in implementations:
        # Both the layer and its first pass may need too much.
        with suppress(torch.OutOfMemoryError):
            layer = layer_of(sizes, name, device, precision)
            both_ways(layer, stream, gradient)
            layers[name] = layer
    rounds = [
        {name: seconds(partial(both_ways, layer, stream, gradient), device) for name, layer in layers.items()}
        for _ in range(ROUNDS)
    ]
    return {name: min(one[name] for one in rounds) for name in layers}


def layer_of(sizes: Sizes, implementation: str, device: str, precision: torch.dtype) -> nn.Module:
    hidden, columns, experts, active, _ = sizes
    options: dict[str, Any] = {"experts_implementation": implementation}
    config: Any = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=columns,
        num_local_experts=experts,
        num_experts_per_tok=active,
        **options,
    )
    torch.manual_seed(0)
    layer = MixtralSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer.to(device, precision)


def both_ways(layer: nn.Module, stream: torch.Tensor, gradient: torch.Tensor) -> None:
    layer.zero_grad()
    stream.grad = None
    layer(stream).backward(gradient)


def seconds(call: Callable[[], None], device: str) -> float:
    """The seconds of a call: the thread's own on a CPU, those between two events on a GPU."""
    if device == "cpu":
        start = time.thread_time()
        call()
        return time.thread_time() - start
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


if __name__ == "__main__":
    main()
