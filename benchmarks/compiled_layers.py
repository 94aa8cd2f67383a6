"""What `[train] compile` brings: CPU seconds of one micro-batch, forward and backward, compiled and not.

One thread and the time of the process, so that other load on the machine counts little; rounds alternate.

    python benchmarks/compiled_layers.py [MODEL]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

from weft.describe.models import resolve_model
from weft.run.stage.build import build_stage
from weft.run.stage.compiled import compile_stage

MICRO_BATCH_SIZE, ROUNDS = 4, 12


def seconds(stage: nn.Module, tokens: torch.Tensor) -> float:
    started = time.process_time()
    stage(tokens).float().square().mean().backward()
    return time.process_time() - started


def main() -> None:
    torch.set_num_threads(1)
    model = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "gpt-1m")
    eager, compiled = (build_stage(model, range(model.layers + 2), 0, torch.float32) for _ in range(2))
    tokens = torch.randint(model.vocabulary, (MICRO_BATCH_SIZE, model.sequence))
    started = time.process_time()
    compile_stage(compiled, tokens, dtype=torch.float32, recompute="none")
    print(f"{model.name}: compiled in {time.process_time() - started:.1f} s")
    times = [(seconds(eager, tokens), seconds(compiled, tokens)) for _ in range(ROUNDS)][2:]
    ratio = statistics.median(second / first for first, second in times)
    print(
        f"eager {statistics.median(first for first, _ in times):.4f} s, "
        f"compiled {statistics.median(second for _, second in times):.4f} s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
