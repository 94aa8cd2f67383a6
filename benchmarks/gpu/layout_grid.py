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

from figures import Value
from harness import Report, parser
from llama_1b import WARM_UP, measure, prepare
from llama_1b import options as one_layout

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


def arguments_of(case: dict[str, Any]) -> argparse.Namespace:
    """A case as arguments of the benchmark of one layout, with its defaults for all others."""
    return argparse.Namespace(**vars(one_layout().parse_args([])) | case)


def in_this_process(case: dict[str, Any]) -> dict[str, Any]:
    """Predict and measure one case."""
    arguments = arguments_of(case)
    problem, plan, program, prediction = prepare(arguments)
    group = problem.job.cluster.groups[0]
    found = {
        "predicted_s": prediction.step_s,
        "predicted_bytes": max(prediction.peak_bytes),
        "fits": max(prediction.needed_bytes) <= group.device.usable_bytes,
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


def cell_of(case: dict[str, Any]) -> str:
    what = f"{case['model']}, {case['sequence']} tokens, size {case['micro_batch_size']}, {case['recompute']}"
    return f"{case['part']} on {case['device']}, {what}"


def figures_of(found: dict[str, Any]) -> dict[str, Value]:
    """What was predicted and, where the layout ran, what was measured."""
    figures = {
        "predicted step": Value(found["predicted_s"], "s"),
        "predicted peak": Value(found["predicted_bytes"], "bytes"),
        "fits": Value(found["fits"], "count"),
        "out of memory": Value(found.get("failed") == _OUT_OF_MEMORY, "count"),
    }
    if "step_s" in found:
        utilisation = found["flops"] / found["step_s"] / found["peak_flops"]
        figures |= {"step": Value(found["step_s"], "s"), "6N": Value(utilisation, "share")}
    if found.get("peak_bytes"):
        figures["peak"] = Value(found["peak_bytes"], "bytes")
    return figures


def judged(grid: list[dict[str, float]], shapes: list[dict[str, float]]) -> Iterator[tuple[str, Value]]:
    """How many layouts miss each target; those of peaks where they were counted."""
    ratios = [(one["predicted peak"] / one["peak"], one["fits"]) for one in grid if "peak" in one]
    if ratios:
        far = sum(abs(ratio - 1.0) > PEAK_TOLERANCE for ratio, _ in ratios)
        yield f"peaks not within {PEAK_TOLERANCE:.0%}", Value(far, "count", 0)
        low = sum(ratio < LEAST_PEAK for ratio, fits in ratios if fits)
        yield f"peaks of fitting plans predicted {1.0 - LEAST_PEAK:.0%} too low", Value(low, "count", 0)
    accepted = sum(one["fits"] and one["out of memory"] for one in grid)
    yield "fitting plans that ran out of memory", Value(accepted, "count", 0)
    both = [one for one in grid if "step" in one]
    if len(both) > 1:
        order = spearman(*(np.array([one[key] for one in both]) for key in ("predicted step", "step")))
        if order is not None:
            yield "Spearman of predicted and measured steps of the grid", Value(order, "ratio")
    errors = [one["predicted step"] / one["step"] - 1.0 for one in shapes if "step" in one]
    if errors:
        far = sum(abs(error) > STEP_TOLERANCE for error in errors)
        yield f"steps of the shapes not within {STEP_TOLERANCE:.0%}", Value(far, "count", 0)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--one", default=None, help=argparse.SUPPRESS)
    return made


def main() -> int:
    asked = options().parse_args()
    if asked.one is not None:
        print(json.dumps(in_this_process(json.loads(asked.one))))
        return 0
    report = Report("layout_grid", asked)
    if asked.device == "cuda" and not torch.cuda.is_available():
        report.say("no CUDA device: nothing was measured")
        return 0
    report.print_machine()
    report.say(f"{STEPS} steps each after {WARM_UP}, {MICRO_BATCHES} micro-batches")
    parts: dict[str, list[dict[str, float]]] = {GRID: [], SHAPES: []}
    for case in cases(asked.device):
        if report.missing(cell := cell_of(case)):
            found = in_a_fresh_process(case)
            if "predicted_s" not in found or found.get("failed", _OUT_OF_MEMORY) != _OUT_OF_MEMORY:
                report.say(f"{cell}: {found['failed']}")
                continue
            report.add_cell(cell, figures_of(found))
        parts[case["part"]].append(report.values(cell))
    for what, one in judged(parts[GRID], parts[SHAPES]):
        report.add(f"{what}, on {asked.device}", one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
