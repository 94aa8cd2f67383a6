"""What `[train] compile` brings: CPU seconds of one micro-batch, forward and backward, compiled and not.

One thread and the time of the process, so that other load on the machine counts little; rounds alternate.

    python benchmarks/compiled_layers.py [MODEL]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from figures import Value
from harness import Report, parser
from torch import nn

from weft.describe.models import resolve_model
from weft.run.stage.build import build_stage
from weft.run.stage.compiled import compile_stage

MICRO_BATCH_SIZE, ROUNDS = 4, 12


def seconds(stage: nn.Module, tokens: torch.Tensor) -> float:
    started = time.process_time()
    stage(tokens).float().square().mean().backward()
    return time.process_time() - started


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", default="gpt-1m")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("compiled_layers", asked)
    report.print_machine()
    if not report.missing(asked.model):
        return
    torch.set_num_threads(1)
    model = resolve_model(asked.model)
    eager, compiled = (build_stage(model, range(model.layers + 2), 0, torch.float32) for _ in range(2))
    tokens = torch.randint(model.vocabulary, (MICRO_BATCH_SIZE, model.sequence))
    started = time.process_time()
    compile_stage(compiled, tokens, dtype=torch.float32, recompute="none")
    compile_s = time.process_time() - started
    times = [(seconds(eager, tokens), seconds(compiled, tokens)) for _ in range(ROUNDS)][2:]
    report.add_cell(
        asked.model,
        {
            "compiling": Value(compile_s, "s"),
            "eager": Value(statistics.median(first for first, _ in times), "s"),
            "compiled": Value(statistics.median(second for _, second in times), "s"),
            "compiled / eager": Value(statistics.median(second / first for first, second in times), "ratio"),
        },
    )


if __name__ == "__main__":
    main()
