"""The host's time to issue the kernels of weft's layers, eager and compiled, in launches for each kernel.

Layers are so small that their own work takes no time. A launch on a GPU, which the host of a CPU does not
make, is one more for each kernel. `weft.predict.cost.host_launches` has the cost model's constants.

    python benchmarks/host_launches.py [--device cuda] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from figures import Value
from harness import Report, parser
from torch import nn

from weft.describe.catalogue import find_device
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.run.stage.build import build_stage
from weft.run.stage.compiled import compile_stage

BLOCKS, ROUNDS = 8, 40
FAMILIES = ("gpt", "llama", "bert", "vit")


def tiny(family: str) -> ModelConfig:
    """Return a model with blocks of a few hundred numbers; only a ViT reads the sizes of images."""
    return ModelConfig(
        name=f"tiny-{family}",
        family=family,
        layers=BLOCKS,
        hidden=8,
        heads=2,
        key_value_heads=2,
        feed_forward=16,
        vocabulary=16,
        sequence=10 if family == "vit" else 8,
        image_size=6 if family == "vit" else 0,
        patch_size=2 if family == "vit" else 0,
        channels=3 if family == "vit" else 0,
    )


def issue_s(blocks: nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """Return the processor's seconds of a block's forward and backward pass."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        outputs = blocks(inputs)
        forward = time.process_time()
        outputs.sum().backward()
        times.append((forward - began, time.process_time() - forward))
    forward_s, backward_s = (statistics.median(column) for column in zip(*times, strict=True))
    return forward_s / BLOCKS, backward_s / BLOCKS


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("families", nargs="*", default=FAMILIES)
    made.add_argument("--device", default="cpu", help="cuda: the driver's launches are measured, too")
    return made


def figures(family: str, device: str, launch_s: float) -> Iterator[tuple[str, Value]]:
    """Measure a family's blocks; yield the figures of both passes by name."""
    model, driver = tiny(family), float(device == "cpu")
    inputs = torch.randn(1, model.sequence, model.hidden, requires_grad=True, device=device)
    eager, compiled = (
        build_stage(model, range(1, BLOCKS + 1), 0, torch.float32).to(device) for _ in range(2)
    )
    compile_stage(compiled, inputs.detach(), dtype=torch.float32, recompute="none")
    block = layer_graph(model).layers[1]
    kernels = block.forward.kernels, block.backward_input.kernels + block.backward_weight.kernels
    passes = zip(
        ("forward", "backward"), kernels, issue_s(eager, inputs), issue_s(compiled, inputs), strict=True
    )
    for name, count, eager_s, compiled_s in passes:
        yield f"{name} kernels", Value(count, "count")
        yield f"{name}, launches a kernel", Value(driver + eager_s / launch_s / count, "ratio")
        yield f"{name}, compiled / eager", Value(compiled_s / eager_s, "ratio")


def main() -> None:
    asked = options().parse_args()
    report = Report("host_launches", asked)
    report.print_machine()
    torch.set_num_threads(1)
    launch_s = find_device("a100-80gb", "device").device.launch_s
    for family in asked.families:
        if report.missing(family):
            report.add_cell(family, dict(figures(family, asked.device, launch_s)))


if __name__ == "__main__":
    main()
