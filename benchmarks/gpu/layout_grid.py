"""One GPU, bf16: twelve layouts of Llama 1B, and six shapes of models, each predicted from its data sheet and
measured.

Of every layout: step, utilisation (6 N operations a token) and peak memory, predicted and measured. Peaks
have three targets: within 10 %, no more than 5 % too low where the plan was said to fit, and no plan that was
said to fit runs out of memory. Steps of the six shapes should be within 5 %. Each layout runs in a process of
its own, for fragments of memory carry over.

    python benchmarks/gpu/layout_grid.py
    python benchmarks/gpu/layout_grid.py --device cpu    # shows that the script runs, and nothing else
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import print_machine
from llama_1b import WARM_UP, measure, prepare

from weft.describe.units import format_bytes, format_seconds
from weft.run.launch.worker_start import start_worker
from weft.scoring.metrics import spearman

GRID, SHAPES = "grid", "shapes"
MICRO_BATCH_SIZES, RECOMPUTES = (1, 2, 4, 8), ("none", "selective", "full")
MODELS = (("gpt2", 1024), ("bert-large", 512), ("llama-1b", 2048), ("llama-1b", 8192), ("gpt2", 256))
LARGEST = ("gpt-6.6b", 512)
STEPS, MICRO_BATCHES = 10, 4
PEAK_TOLERANCE, LEAST_PEAK, STEP_TOLERANCE = 0.10, 0.95, 0.05
_OUT_OF_MEMORY = "out of memory"


def cases(device: str) -> Iterator[dict[str, Any]]:
    """What is predicted and measured; on a CPU small ones of the same form."""
    base = {"micro_batches": MICRO_BATCHES, "steps": STEPS, "device": device}
    grid_model, sequence = ("llama-1b", 2048) if device == "cuda" else ("llama-1m", 64)
    for size, recompute in product(MICRO_BATCH_SIZES, RECOMPUTES):
        case = {"model": grid_model, "sequence": sequence, "micro_batch_size": size, "recompute": recompute}
        # Layers that recompute selectively cannot be compiled; all layouts of the grid run alike.
        yield {"part": GRID, "eager": True, **base, **case}
    shapes = (*MODELS, LARGEST) if device == "cuda" else (("gpt-1m", 64), ("bert-1m", 64))
    for model, sequence in shapes:
        case = {"model": model, "sequence": sequence, "micro_batch_size": 1, "recompute": "none"}
        yield {"part": SHAPES, "eager": False, **base, **case}


def in_this_process(case: dict[str, Any]) -> dict[str, Any]:
    """Predict and measure one case."""
    arguments = argparse.Namespace(**case)
    problem, plan, program, prediction = prepare(arguments)
    group = problem.job.cluster.groups[0]
    found = {
        "predicted_s": prediction.step_s,
        "predicted_bytes": max(prediction.peak_bytes),
        "fits": max(prediction.peak_bytes) <= group.device.usable_bytes,
        "peak_flops": group.device.flops_per_s["bf16"],
        "flops": 6.0 * problem.job.graph.parameters() * plan.global_batch * arguments.sequence,
    }
    context = start_worker()
    try:
        times, peak, _ = measure(arguments, problem, plan, program, False, 0)
    except torch.cuda.OutOfMemoryError:
        return found | {"failed": _OUT_OF_MEMORY}
    finally:
        context.close()
    return found | {"step_s": statistics.median(times), "peak_bytes": peak}


def in_a_fresh_process(case: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own; `failed` says why there is no measurement."""
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"failed": last[:120]}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def told(case: dict[str, Any], found: dict[str, Any]) -> str:
    """One line of the table."""
    what = f"{case['model']}, {case['sequence']} tokens, size {case['micro_batch_size']}, {case['recompute']}"
    if "predicted_s" not in found:
        return f"{what:<48} {found['failed']}"
    guess = f"predicted {format_seconds(found['predicted_s'])} {format_bytes(found['predicted_bytes'])}"
    if "step_s" not in found:
        return f"{what:<48} {guess}, {'fits' if found['fits'] else 'too big'}: {found['failed']}"
    utilisation = found["flops"] / found["step_s"] / found["peak_flops"]
    off = found["predicted_s"] / found["step_s"] - 1.0
    line = (
        f"{what:<48} {guess}, measured {format_seconds(found['step_s'])} ({off:+.1%}), 6N {utilisation:.1%}"
    )
    if found["peak_bytes"]:
        line += f", {format_bytes(found['peak_bytes'])}"
        line += f" ({found['predicted_bytes'] / found['peak_bytes'] - 1.0:+.1%})"
    return line


def judged(results: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """The targets, met or missed; those of peaks where they were counted."""
    grid = [found for case, found in results if case["part"] == GRID]
    shapes = [found for case, found in results if case["part"] == SHAPES and "step_s" in found]
    counted = [one for one in grid if one.get("peak_bytes")]
    if counted:
        ratios = [one["predicted_bytes"] / one["peak_bytes"] for one in counted]
        within = all(abs(ratio - 1.0) <= PEAK_TOLERANCE for ratio in ratios)
        yield f"peaks within {PEAK_TOLERANCE:.0%}: {'met' if within else 'MISSED'}"
        fitting = [ratio for ratio, one in zip(ratios, counted, strict=True) if one["fits"]]
        enough = all(ratio >= LEAST_PEAK for ratio in fitting)
        yield f"no peak of a fitting plan predicted {1.0 - LEAST_PEAK:.0%} too low: {_met(enough)}"
    accepted = any(one.get("fits") and one.get("failed") == _OUT_OF_MEMORY for one in grid)
    yield f"no fitting plan ran out of memory: {_met(not accepted)}"
    both = [one for one in grid if "step_s" in one]
    if len(both) > 1:
        guesses, steps = (np.array([one[key] for one in both]) for key in ("predicted_s", "step_s"))
        order = spearman(guesses, steps)
        words = "-" if order is None else f"{order:.3f}"
        yield f"Spearman of predicted and measured steps of the grid: {words}"
    if shapes:
        close = all(abs(one["predicted_s"] / one["step_s"] - 1.0) <= STEP_TOLERANCE for one in shapes)
        yield f"steps of the shapes within {STEP_TOLERANCE:.0%}: {_met(close)}"


def _met(holds: bool) -> str:
    return "met" if holds else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(in_this_process(json.loads(arguments.one))))
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    print_machine()
    print(f"{STEPS} steps each after {WARM_UP}, {MICRO_BATCHES} micro-batches")
    results = []
    for case in cases(arguments.device):
        found = in_a_fresh_process(case)
        print(told(case, found), flush=True)
        results.append((case, found))
    print(*judged(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
