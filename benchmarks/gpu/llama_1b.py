"""One GPU, bf16: Llama 3.2 1B through weft's runtime, beside its prediction and beside torchtitan.

Prints tokens per second, peak memory, what recording every instruction costs, and predicted over measured
step and peak. Stages are compiled unless `--eager`; `--fp8 tensorwise` multiplies blocks in 8 bits.

    python benchmarks/gpu/llama_1b.py
    python benchmarks/gpu/llama_1b.py --schedule gpipe --offload states activations
    python benchmarks/gpu/llama_1b.py --torchtitan FOLDER --torchtitan-config llama3_1b

For the peer, `git clone https://github.com/pytorch/torchtitan FOLDER`, install what it needs, and add a
function to its llama3 `config_registry.py` that returns a configuration of the same model (its flavour "1B"),
compiled as here; sequence, batch and steps are given to it. It clips gradients, which weft does not here.
Without a peer that line is left out. On a machine without CUDA, `--model llama-1m --sequence 64 --device cpu`
shows that the script runs, and nothing else.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import Value
from harness import Report, parser

from weft.describe.catalogue import catalogue
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.prediction import Prediction
from weft.methods.fp8_linears.options import RECIPES, Fp8LinearsTable, choices_of
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_plan
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.run.launch.worker_start import start_worker
from weft.run.record.recorder import Recorder
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.stage.compiled import compile_stage
from weft.run.state.precision import PRECISIONS, STEPPED

WARM_UP = 5
SEED = 0
# Goals: at least as fast as the peer with at most as much memory; predictions within this part.
TOLERANCE = 0.05


def main() -> int:
    asked = options().parse_args()
    report = Report("llama_1b", asked)
    if asked.device == "cuda" and not torch.cuda.is_available():
        report.say("no CUDA device: nothing was measured")
        return 0
    report.print_machine()
    batch = f"{asked.micro_batches} micro-batches of {asked.micro_batch_size} x {asked.sequence} tokens"
    layers = "eager" if asked.eager else "compiled"
    products = "" if asked.fp8 is None else f", fp8 {asked.fp8}"
    cell = (
        f"{asked.model}, {batch}, {asked.steps} steps, recomputed {asked.recompute}, "
        f"{layers}{products}, {asked.device}"
    )
    if asked.offload:
        cell += f", {asked.schedule}, offload of {' and '.join(asked.offload)}"
    if report.missing(cell):
        figures, tokens_per_s, reserved = measured_beside_prediction(asked)
        report.add_cell(cell, figures)
        if asked.torchtitan is not None:
            add_peer(report, f"{cell}, torchtitan", asked, tokens_per_s, reserved)
    return 0


def measured_beside_prediction(asked: argparse.Namespace) -> tuple[dict[str, Value], float, int]:
    """The figures of one model, tokens per second, and the most bytes that were reserved."""
    problem, plan, program, prediction = prepare(asked)
    context = start_worker()
    times = {}
    for generation, records in enumerate((True, False)):
        times[records], peak, reserved = measure(asked, problem, plan, program, records, generation)
    context.close()
    step_s = statistics.median(times[True])
    tokens_per_s = plan.global_batch * asked.sequence / step_s
    figures = {
        "tokens": Value(tokens_per_s, "per s"),
        "step": Value(step_s, "s", low=min(times[True]), high=max(times[True])),
        "what recording adds": Value(step_s / statistics.median(times[False]) - 1.0, "share"),
        "error of the predicted step": error_of(prediction.step_s, step_s),
    }
    if peak:  # on a CPU nobody counts
        figures["peak"] = Value(peak, "bytes")
        figures["error of the predicted peak"] = error_of(max(prediction.peak_bytes), peak)
    return figures, tokens_per_s, reserved


def error_of(predicted: float, measured: float) -> Value:
    error = predicted / measured - 1.0
    return Value(error, "share", TOLERANCE, met=abs(error) <= TOLERANCE)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--model", default="llama-1b")
    made.add_argument("--sequence", type=int, default=4096)
    made.add_argument("--micro-batch-size", type=int, default=2)
    made.add_argument("--micro-batches", type=int, default=4)
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--recompute", default="none")
    made.add_argument("--schedule", default="1f1b")
    made.add_argument("--offload", nargs="+", choices=("states", "activations"), default=[])
    made.add_argument("--eager", action="store_true")
    made.add_argument("--fp8", choices=RECIPES, default=None, help="the recipe of products in 8 bits")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--torchtitan", type=Path, default=None)
    made.add_argument("--torchtitan-config", default="llama3_1b")
    return made


def prepare(arguments: argparse.Namespace) -> tuple[Problem, Plan, Program, Prediction]:
    """One stage on one device, and what weft expects of it."""
    samples, offload = arguments.micro_batch_size * arguments.micro_batches, arguments.offload
    problem = problem_of(
        model=arguments.model,
        on=f"1x{_device_name(arguments.device)}",
        global_batch=samples,
        sequence=arguments.sequence,
        precision="bf16",
    )
    if arguments.fp8 is not None:
        problem = problem.choosing(choices_of(Fp8LinearsTable(recipe=arguments.fp8), problem.job.graph))
    layout = Layout(
        pp=1,
        dp=1,
        loops=1,
        micro_batch_size=arguments.micro_batch_size,
        schedule=arguments.schedule,
        recompute=arguments.recompute,
        methods=(Choice(name="offload", options=dict.fromkeys(offload, True)),) if offload else (),
    )
    plan = build_plan(problem.job, layout, flops_per_layer(problem.job))
    program = compile_plan(plan, problem.job.graph)
    expected = predict(
        CostModel(
            graph=problem.job.graph,
            cluster=problem.job.cluster,
            machine=problem.measurements.machine,
            profile=problem.measurements.profile,
        ),
        plan,
        program,
    )
    return problem, plan, program, expected.prediction


def _device_name(device: str) -> str:
    """The catalogue's name of this machine's GPU; on a CPU any device that computes bf16 will do."""
    if device == "cpu":
        return "h100-80gb"
    found = re.sub(r"[^a-z0-9]+", "", torch.cuda.get_device_name().lower())
    names = [name for name in catalogue() if name.partition("-")[0] in found]
    if not names:
        raise SystemExit(f"the device catalogue does not know {torch.cuda.get_device_name()}")
    memory = torch.cuda.get_device_properties(0).total_memory
    return min(names, key=lambda name: abs(catalogue()[name].device.memory_bytes - memory))


def measure(
    arguments: argparse.Namespace,
    problem: Problem,
    plan: Plan,
    program: Program,
    records: bool,
    generation: int,
) -> tuple[list[float], int, int]:
    """Seconds of every step after the warm-up, and the most bytes that were allocated and reserved."""
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    stages = build_stages(plan, problem.model, 0, SEED, STEPPED[plan.precision])
    stage = stages[0].to(device)
    generator = torch.Generator().manual_seed(SEED)
    shape = (plan.global_batch, arguments.sequence + 1)
    tokens = torch.randint(problem.model.vocabulary, shape, generator=generator)
    size = plan.micro_batch_size
    if not arguments.eager:
        inputs = tokens[:size, :-1].to(device)
        compile_stage(stage, inputs, dtype=PRECISIONS[plan.precision], recompute=arguments.recompute)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = tokens[number * size : (number + 1) * size]
        return part[:, :-1], part[:, 1:]

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=cuda, foreach=not cuda)

    steps, times = WARM_UP + arguments.steps, []
    with tempfile.TemporaryDirectory(prefix="weft-llama-") as folder:
        recorder = (
            Recorder(Path(folder), program=part_of(program, 0), plan_id=plan.plan_id, steps=steps)
            if records
            else None
        )
        runtime = RankRuntime(
            plan,
            part_of(program, 0),
            {0: stage},
            loss_of,
            adamw,
            device=device,
            seed=SEED,
            recorder=recorder,
            generation=generation,
        )
        for step in range(steps):
            began = time.perf_counter()
            result = runtime.step(step, batch)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        loss = result.loss
        runtime.close()
        if recorder is not None:
            recorder.close()
    words = f"{'recorded' if records else 'unrecorded'}: loss {loss:.4f} after {steps} steps on one batch"
    print(words, file=sys.stderr)
    if not cuda:
        return times[WARM_UP:], 0, 0
    return times[WARM_UP:], torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def add_peer(
    report: Report, cell: str, arguments: argparse.Namespace, ours: float, our_reserved: int
) -> None:
    """Compare the last speed and memory that torchtitan's own trainer logs on one GPU.

    What it logs is the memory that the allocator has reserved.
    """
    words = {
        "training.seq_len": arguments.sequence,
        "training.local_batch_size": arguments.micro_batch_size,
        "training.global_batch_size": arguments.micro_batch_size * arguments.micro_batches,
        "training.steps": WARM_UP + arguments.steps,
    }
    logged = torchtitan_log(report, arguments.torchtitan, arguments.torchtitan_config, 1, words)
    if logged is None:
        return
    theirs, their_reserved = logged
    figures = {
        "tokens of theirs": Value(theirs, "per s"),
        "reserved by theirs": Value(their_reserved, "bytes"),
        "tokens, weft / torchtitan": Value(ours / theirs, "ratio", 1.0, met=ours >= theirs),
        "memory, weft / torchtitan": Value(our_reserved / their_reserved, "ratio", 1.0),
    }
    report.add_cell(cell, figures)


def torchtitan_log(
    report: Report, folder: Path, config: str, ranks: int, words: dict[str, object]
) -> tuple[float, float] | None:
    """Run torchtitan's trainer; return the last tokens/s and bytes that it logs of a GPU, or None."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "torchtitan.train", "--module", "llama3", "--config", config]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout + run.stderr)
    speeds, memories = re.findall(r"tps: ([\d,]+)", text), re.findall(r"memory: +([\d.]+)GiB", text)
    if run.returncode or not speeds or not memories:
        report.say(f"torchtitan did not run: {(text.strip().splitlines() or ['no output'])[-1]}")
        return None
    return float(speeds[-1].replace(",", "")), float(memories[-1]) * 2**30


if __name__ == "__main__":
    sys.exit(main())
