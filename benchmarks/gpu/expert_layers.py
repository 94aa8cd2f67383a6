"""One GPU, bf16: expert layers beside those of `transformers`, and what methods of mixtures add to a step.

Layers have the sizes of OLMoE-1B-7B, Qwen3-30B-A3B and Mixtral 8x7B, and run forward and backward. The ratio
is the least of the implementations of `transformers` over ours. One that needs more memory than there is, is
left out. A stack of two blocks of OLMoE, of a billion parameters, trains with and without a balance of its
experts, and with and without clipped micro-batches. With two or four GPUs, the stack also trains with `ep`.

    python benchmarks/gpu/expert_layers.py
    python benchmarks/gpu/expert_layers.py --tiny    # on a CPU: shows that the script runs, and nothing else
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from experts import OTHERS, Sizes, measure
from figures import Value
from harness import Report, parser
from llama_1b import WARM_UP, error_of
from many_gpus import ALONE, trained
from taps import MICRO_BATCHES, ROUNDS, added, choice_of, figures_of, plan_of

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import EXPERT_BALANCE, MICRO_BATCH_CLIPPING

ALL = (*OTHERS, "batched_mm")
# The largest shares of a step that methods may add to it.
TARGETS = {EXPERT_BALANCE: 0.01, MICRO_BATCH_CLIPPING: 0.03}
DEGREES = (2, 4)


@dataclass(frozen=True)
class Scale:
    """What is measured: layers of presets, and a stack of a preset's first blocks.

    `rounds`: of the comparisons with methods. `steps`: of trainings with `ep`, beside their first ones.
    """

    device: str
    precision: Literal["fp32", "bf16"]
    layers: tuple[str, ...]
    tokens: tuple[int, ...]
    stack: str
    blocks: int
    micro_batch_size: int
    sequence: int
    rounds: int
    steps: int


LARGE = Scale(
    device="cuda",
    precision="bf16",
    layers=("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x7b"),
    tokens=(4096, 16384),
    stack="olmoe-1b-7b",
    blocks=2,
    micro_batch_size=4,
    sequence=1024,
    rounds=ROUNDS,
    steps=20,
)
TINY = Scale(
    device="cpu",
    precision="bf16",
    layers=("mixtral-1m",),
    tokens=(64, 256),
    stack="mixtral-1m",
    blocks=2,
    micro_batch_size=4,
    sequence=64,
    rounds=2,
    steps=5,
)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--tiny", action="store_true", help="small sizes on a CPU, with ranks over gloo")
    return made


def main() -> int:
    asked = options().parse_args()
    report = Report("gpu_experts", asked)
    scale = TINY if asked.tiny else LARGE
    if scale.device == "cuda" and not torch.cuda.is_available():
        report.say("no CUDA device: nothing was measured")
        return 0
    report.print_machine()
    torch.set_num_threads(1)
    for sizes in sizes_of(scale):
        measure(report, scale.device, sizes, torch.bfloat16, ALL)
    add_methods(report, scale)
    add_ranks(report, scale, DEGREES[0] if asked.tiny else torch.cuda.device_count())
    return 0


def sizes_of(scale: Scale) -> list[Sizes]:
    """The expert layers of the presets, with each number of tokens."""
    found: list[Sizes] = []
    for name in scale.layers:
        model = resolve_model(name)
        experts = model.architecture.experts
        assert experts is not None, "the presets are mixtures"
        sizes = (model.hidden, experts.width, experts.count, experts.active)
        found += [(*sizes, tokens) for tokens in scale.tokens]
    return found


def stack_of(scale: Scale) -> ModelConfig:
    return replace(resolve_model(scale.stack, sequence=scale.sequence), layers=scale.blocks)


def shape_of(scale: Scale) -> str:
    batch = f"{MICRO_BATCHES} micro-batches of {scale.micro_batch_size} x {scale.sequence} tokens"
    return f"{scale.blocks} blocks of {scale.stack}, {batch}, {scale.device}"


def add_methods(report: Report, scale: Scale) -> None:
    """What a balance and clipping add to a step, which is their share of a micro-batch, too."""
    left = {name: cell for name in TARGETS if report.missing(cell := f"{name}: {shape_of(scale)}")}
    if not left:
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = stack_of(scale)
    plan = plan_of(config, scale.micro_batch_size, scale.sequence, "gpipe", scale.precision)
    for name, cell in left.items():
        choice = choice_of(name, scale.micro_batch_size)
        # Each name of a runtime's generation is used once.
        first = list(TARGETS).index(name) * scale.rounds
        rounds = [
            added(config, plan, choice, number, scale.device) for number in range(first, first + scale.rounds)
        ]
        report.add_cell(cell, figures_of(rounds, TARGETS[name]))
    dist.destroy_process_group()


def add_ranks(report: Report, scale: Scale, devices: int) -> None:
    """The stack on as many expert ranks as there are devices, beside one of them."""
    for degree in DEGREES:
        cell = f"ep {degree}: {shape_of(scale)}"
        if devices < degree:
            report.say(f"{cell}: needs {degree} GPUs")
        elif report.missing(cell):
            one, several = (on_ranks(scale, ranks) for ranks in (1, degree))
            tokens, alone = (found["tokens_per_s"] for found in (several, one))
            step_s, predicted_s = several["measured_step_s"], several["predicted_step_s"]
            figures = {
                "tokens": Value(tokens, "per s"),
                "tokens over one device": Value(tokens / alone, "ratio"),
                "step": Value(step_s, "s"),
                "error of the predicted step": error_of(predicted_s, step_s),
            }
            report.add_cell(cell, figures)


def on_ranks(scale: Scale, ranks: int) -> dict[str, Any]:
    """The summary of a run with so many expert ranks."""
    record = json.loads(resolve_model(scale.stack).record) | {"num_hidden_layers": scale.blocks}
    with tempfile.TemporaryDirectory(prefix="weft-experts-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(record))
        job: dict[str, dict[str, Any]] = {
            "model": {"hf": str(path)},
            "task": {"sequence": scale.sequence},
            "train": {
                "global_batch": MICRO_BATCHES * scale.micro_batch_size,
                "steps": WARM_UP + scale.steps,
                "precision": scale.precision,
            },
            "run": {"transport": "device"},
        }
        plan = {
            **ALONE,
            "ep": ranks,
            "micro_batch_size": scale.micro_batch_size,
            "schedule": "gpipe",
        }
        return trained(scale.device, job, plan, ranks)


if __name__ == "__main__":
    sys.exit(main())
