"""A training loop of one's own that executes a weft plan.

weft plan gpt-1m --on this-machine --global-batch 16 --sequence 128 --pp 2 --dp 1 --out plan.json
torchrun --nproc-per-node 2 own_loop.py plan.json
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import weft

STEPS = 20


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(samples: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Consecutive windows of a source file's bytes; every rank reads the same ones."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    size = samples * tokens
    for start in range(0, len(data) - size, size):
        yield (
            data[start : start + size].view(samples, tokens),
            data[start + 1 : start + 1 + size].view(samples, tokens),
        )


def main(plan_file: str) -> None:
    with weft.Runtime(plan_file, "gpt-1m", loss_fn) as runtime:
        step = 0
        while step < STEPS:
            for inputs, targets in batches(runtime.plan.global_batch, runtime.plan.sequence):
                loss = runtime.step(inputs, targets)
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {loss:.3f}", flush=True)
                step += 1
                if step == STEPS:
                    break


if __name__ == "__main__":
    main(sys.argv[1])
