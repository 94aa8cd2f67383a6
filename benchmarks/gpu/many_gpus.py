"""All GPUs of this machine through `weft train`: replicas, sharded replicas, a pipeline, and tensor ranks.

Equality: a small Llama trains in fp32 with deterministic kernels: on one GPU, and under each layout twice.
Losses must be near those of one GPU, and repeat bit by bit. Speed: Llama 3.2 1B trains compiled in bf16. Each
layout gives tokens per second, the largest peak, and the errors of both predictions.

    python benchmarks/gpu/many_gpus.py
    python benchmarks/gpu/many_gpus.py --torchtitan FOLDER --torchtitan-config llama3_1b --megatron FOLDER

The peers train the same model with the same degrees, on data of their own. `llama_1b.py` says how to prepare
torchtitan. For Megatron-LM, `git clone https://github.com/NVIDIA/Megatron-LM FOLDER` and install what it
needs. On a machine without CUDA, `--device cpu --ranks 2` shows that the script runs over gloo, and nothing
else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import Value
from harness import Report, parser
from llama_1b import WARM_UP, error_of, torchtitan_log

from weft.describe.toml_table import table_text

EQUAL_STEPS = 5
# A plan of one device.
ALONE = {"pp": 1, "dp": 1, "tp": 1, "loops": 1, "recompute": "none"}
# Of losses in fp32 after a few steps: sums of NCCL have an order of their own.
CLOSE = 1e-4
# The degrees of a layout: `[plan]` of weft, the options of torchtitan and those of Megatron-LM.
LAYOUTS = {
    "dp": ("dp", "data_parallel_replicate_degree", None),
    "zero-3": ("dp", "data_parallel_shard_degree", None),
    "pp": ("pp", "pipeline_parallel_degree", "pipeline-model-parallel-size"),
    "tp": ("tp", "tensor_parallel_degree", "tensor-model-parallel-size"),
}


def main() -> int:
    asked = options().parse_args()
    report = Report("many_gpus", asked)
    if asked.device == "cuda":
        asked.ranks = torch.cuda.device_count()
    if asked.ranks < 2:
        report.say("fewer than two CUDA devices: nothing was measured")
        return 0
    report.print_machine()
    for layout in LAYOUTS:
        cell = f"{layout} {asked.ranks}, {asked.device}"
        if report.missing(f"{cell}, equality"):
            report.add_cell(f"{cell}, equality", equality(asked, layout))
        speed = f"{cell}, {asked.model}, {asked.micro_batches} micro-batches of {asked.sequence} tokens"
        if report.missing(speed):
            report.add_cell(speed, speeds(report, asked, layout))
    return 0


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--model", default="llama-1b")
    made.add_argument("--sequence", type=int, default=4096)
    made.add_argument("--micro-batches", type=int, default=8, help="of each pipeline, of one sample each")
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--ranks", type=int, default=0, help="with --device cpu; otherwise all GPUs")
    made.add_argument("--torchtitan", type=Path, default=None)
    made.add_argument("--torchtitan-config", default="llama3_1b")
    made.add_argument("--megatron", type=Path, default=None)
    return made


def equality(asked: argparse.Namespace, layout: str) -> dict[str, Value]:
    """How far the losses of a layout are from those of one device, and from those of a repetition."""
    job: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama-1m"},
        "task": {"sequence": 128},
        "train": {"global_batch": 4 * asked.ranks, "steps": EQUAL_STEPS, "precision": "fp32"},
        "run": {"transport": "device", "deterministic": True},
    }
    alone, first, again = (
        trained(asked.device, job, plan_of(layout, ranks), ranks)["losses"]
        for ranks in (1, asked.ranks, asked.ranks)
    )
    apart = max(abs(ours / theirs - 1.0) for ours, theirs in zip(first, alone, strict=True))
    changed = sum(one != other for one, other in zip(first, again, strict=True))
    return {
        "losses beside one device": Value(apart, "share", CLOSE, met=apart <= CLOSE),
        "losses that a repetition changes": Value(changed, "count", 0),
    }


def speeds(report: Report, asked: argparse.Namespace, layout: str) -> dict[str, Value]:
    """Tokens per second beside those of the peers, and predictions beside measurements."""
    samples = asked.micro_batches * (asked.ranks if LAYOUTS[layout][0] == "dp" else 1)
    found = trained(
        asked.device,
        {
            "model": {"preset": asked.model},
            "task": {"sequence": asked.sequence},
            "train": {
                "global_batch": samples,
                "steps": WARM_UP + asked.steps,
                "precision": "bf16",
                "compile": True,
            },
            "run": {"transport": "device"},
        },
        plan_of(layout, asked.ranks),
        asked.ranks,
    )
    ours = found["tokens_per_s"]
    figures = {
        "tokens": Value(ours, "per s"),
        "step": Value(found["measured_step_s"], "s"),
        "error of the predicted step": error_of(found["predicted_step_s"], found["measured_step_s"]),
    }
    if peaks := found.get("max_device_bytes"):  # on a CPU nobody counts
        figures["peak"] = Value(max(peaks), "bytes")
        figures["error of the predicted peak"] = error_of(max(found["predicted_peak_bytes"]), max(peaks))
    peers = {
        "torchtitan": torchtitan_tokens_per_s(report, asked, layout, samples),
        "Megatron-LM": megatron_tokens_per_s(report, asked, layout, samples),
    }
    for peer, theirs in peers.items():
        if theirs is not None:
            figures[f"tokens of {peer}"] = Value(theirs, "per s")
            figures[f"tokens, weft / {peer}"] = Value(ours / theirs, "ratio", 1.0, met=ours >= theirs)
    return figures


def plan_of(layout: str, ranks: int) -> dict[str, Any]:
    """The table `[plan]` of a layout on that many devices."""
    plan: dict[str, Any] = {"micro_batch_size": 1, **ALONE, LAYOUTS[layout][0]: ranks}
    if ranks > 1:
        plan |= {"sharding": "zero-3"} if layout == "zero-3" else {}
        plan |= {"schedule": "1f1b"} if layout == "pp" else {}
    return plan


def trained(device: str, job: dict[str, dict[str, Any]], plan: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Train a job under a plan on that many devices; return its summary and the losses of its steps."""
    tables = {
        **job,
        "optimizer": {"warm_up_steps": 0, "learning_rate": 1e-4},
        "checkpoint": {"every": 10**6},
        "cluster": {"use": "this-machine"},
        "plan": plan,
    }
    devices = ",".join(str(device) for device in range(ranks))
    with tempfile.TemporaryDirectory(prefix="weft-many-") as folder:
        run, directory = Path(folder) / "run.toml", Path(folder) / "run"
        run.write_text("\n".join(table_text(f"[{name}]", table) for name, table in tables.items()))
        command = [sys.executable, "-m", "weft", "train", str(run), "--directory", str(directory)]
        if device == "cpu":
            command = ["taskset", "-c", devices, *command]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": devices, "WEFT_HOME": f"{folder}/home"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{plan} on {ranks} devices failed:\n{(done.stdout + done.stderr)[-2_000:]}")
        summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return {**summary, "losses": [row["loss"] for row in rows]}


def torchtitan_tokens_per_s(
    report: Report, asked: argparse.Namespace, layout: str, samples: int
) -> float | None:
    if asked.torchtitan is None:
        return None
    replicas = asked.ranks if LAYOUTS[layout][0] == "dp" else 1
    words = {
        "training.seq_len": asked.sequence,
        "training.local_batch_size": samples // replicas if layout == "pp" else 1,
        "training.global_batch_size": samples,
        "training.steps": WARM_UP + asked.steps,
        f"parallelism.{LAYOUTS[layout][1]}": asked.ranks,
    }
    if layout == "pp":
        words |= {
            "parallelism.pipeline_parallel_schedule": "1F1B",
            "parallelism.pipeline_parallel_microbatch_size": 1,
        }
    if layout != "zero-3":
        words["parallelism.data_parallel_shard_degree"] = 1
    logged = torchtitan_log(report, asked.torchtitan, asked.torchtitan_config, asked.ranks, words)
    # What it logs is of one device.
    return None if logged is None else logged[0] * asked.ranks


def megatron_tokens_per_s(
    report: Report, asked: argparse.Namespace, layout: str, samples: int
) -> float | None:
    """Run Megatron-LM's GPT program on Llama 3.2 1B and made-up data."""
    if asked.megatron is None:
        return None
    words = {
        "num-layers": 16,
        "hidden-size": 2048,
        "ffn-hidden-size": 8192,
        "num-attention-heads": 32,
        "num-query-groups": 8,
        "seq-length": asked.sequence,
        "max-position-embeddings": asked.sequence,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "micro-batch-size": 1,
        "global-batch-size": samples,
        "train-iters": WARM_UP + asked.steps,
        "lr": 1e-4,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 128255,
        "log-interval": 1,
        "eval-iters": 0,
    }
    degree = LAYOUTS[layout][2]
    if degree is not None:
        words[degree] = asked.ranks
    flags = ["group-query-attention", "swiglu", "disable-bias-linear", "bf16", "mock-data"]
    flags += ["use-torch-fsdp2"] if layout == "zero-3" else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={asked.ranks}", "pretrain_gpt.py", *(f"--{flag}" for flag in flags)]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = subprocess.run(
        command, cwd=asked.megatron, env=environment, capture_output=True, text=True, check=False
    )
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", run.stdout)
    if run.returncode or len(times) <= WARM_UP:
        last = ((run.stdout + run.stderr).strip().splitlines() or ["no output"])[-1]
        report.say(f"Megatron-LM did not run: {last}")
        return None
    return samples * int(asked.sequence) / (statistics.median(map(float, times[WARM_UP:])) / 1e3)


if __name__ == "__main__":
    sys.exit(main())
