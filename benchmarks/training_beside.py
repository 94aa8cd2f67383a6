"""Whole training on two CPU ranks beside `transformers.Trainer` under accelerate, and torchtitan.

GPT and Llama of 1M and 10M parameters start from the same weights and read the same text, bytes as tokens.
Each program runs as its users run it, from command to exit, in turns with the others:

    dp 2          beside the Trainer with DistributedDataParallel
    dp 2, zero-3  beside the Trainer with FSDP2
    pp 2          beside the Trainer with DistributedDataParallel, because the Trainer has no pipelines

Each takes the loss of as many held-out samples before its first step. Tokens per second come from the median
time between the ends of steps. Start-up lasts from the command to the end of the first step. Peak memory is
the sum of all processes' peaks. torchtitan is left out where it does not start. Get the peers with
`pip install accelerate torchtitan`.

    python benchmarks/training_beside.py [--rounds N] [MODEL ...]
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
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import Value
from harness import Report, parser, peak_bytes, python_sources
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, set_seed

from weft.describe.run_tables.training import HELD_OUT_SAMPLES
from weft.describe.toml_table import table_text

RANKS, SEQUENCE, MICRO_BATCH_SIZE, MICRO_BATCHES = 2, 256, 4, 2
STEPS, WARM_UP, ROUNDS, LOG_EVERY = 15, 4, 3, 5
LEARNING_RATE = 1e-3
TEXT_BYTES = 4_000_000
# Trainings of one model on one text end with about the same loss, though samples come in other orders.
SAME_LOSS = 0.1
LIMIT_S = 600.0
POLL_S = 0.1
SEED = 7
TARGET = 1.0


def gpt(layers: int, hidden: int, heads: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        use_cache=False,
    )


def llama(layers: int, hidden: int, heads: int, feed_forward: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=feed_forward,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )


MODELS: Mapping[str, PreTrainedConfig] = {
    "gpt-1m": gpt(4, 128, 4),
    "llama-1m": llama(4, 128, 4, 384),
    "gpt-10m": gpt(8, 320, 5),
    "llama-10m": llama(8, 320, 10, 864),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """One whole training: when it began and its steps ended, its memory, and its loss at the end."""

    began_s: float
    ends_s: tuple[float, ...]
    peak_bytes: int
    loss: float

    @property
    def tokens_per_s(self) -> float:
        later = self.ends_s[WARM_UP:]
        step_s = statistics.median(b - a for a, b in pairwise(later))
        return RANKS * MICRO_BATCHES * MICRO_BATCH_SIZE * SEQUENCE / step_s

    @property
    def start_up_s(self) -> float:
        return self.ends_s[0] - self.began_s


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A program that trains: ours with keys of `[plan]`, the Trainer with its own options."""

    name: str
    plan: Mapping[str, Any] | None = None
    words: tuple[str, ...] = field(default=())

    def train(self, model: Path, text: Path, out: Path) -> Trained:
        out.mkdir()
        if self.plan is None:
            return self._trainer(model, text, out)
        return self._weft(model, text, out)

    def _weft(self, model: Path, text: Path, out: Path) -> Trained:
        assert self.plan is not None
        tables: dict[str, dict[str, Any]] = {
            "model": {"hf": str(model), "weights": True},
            "task": {"kind": "causal-lm", "data": str(text), "sequence": SEQUENCE},
            "train": {
                "global_batch": RANKS * MICRO_BATCHES * MICRO_BATCH_SIZE,
                "steps": STEPS,
                "precision": "fp32",
            },
            "optimizer": {
                "name": "adamw",
                "learning_rate": LEARNING_RATE,
                "betas": [0.9, 0.999],
                "weight_decay": 0.0,
                "warm_up_steps": 0,
            },
            "cluster": {"use": "this-machine"},
            "plan": {"micro_batch_size": MICRO_BATCH_SIZE, **self.plan},
        }
        run = out / "run.toml"
        run.write_text("\n".join(table_text(f"[{name}]", table) for name, table in tables.items()))
        command = ["-m", "weft", "train", str(run), "--directory", str(out / "run")]
        began_s, peak_bytes = watched(command, out)
        rows = rows_of(out / "run" / "metrics.jsonl")
        losses = [row["loss"] for row in rows[-LOG_EVERY:]]
        ends_s = tuple(row["time_s"] for row in rows)
        return Trained(began_s, ends_s, peak_bytes, statistics.fmean(losses))

    def _trainer(self, model: Path, text: Path, out: Path) -> Trained:
        script = Path(__file__).parent / "peer_programs" / "hugging_face_trainer.py"
        options = {
            "sequence": SEQUENCE,
            "micro-batch-size": MICRO_BATCH_SIZE,
            "micro-batches": MICRO_BATCHES,
            "steps": STEPS,
            "log-every": LOG_EVERY,
            "held-out": HELD_OUT_SAMPLES,
            "learning-rate": LEARNING_RATE,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        folders = [str(path) for path in (script, model, text, out)]
        began_s, peak_bytes = watched([*ranks, *folders, *words, *self.words], out)
        rows = rows_of(out / "steps.jsonl")
        ends_s = tuple(row["time_s"] for row in rows if "time_s" in row)
        return Trained(
            began_s, ends_s, peak_bytes, [row for row in rows if "last_loss" in row][-1]["last_loss"]
        )


WEFT_DP = Contender("weft dp 2", {"dp": 2, "pp": 1})
WEFT_ZERO_3 = Contender("weft dp 2 zero-3", {"dp": 2, "pp": 1, "sharding": "zero-3"})
WEFT_PP = Contender("weft pp 2", {"dp": 1, "pp": 2})
DDP = Contender("Trainer DDP")
FSDP2 = Contender("Trainer FSDP2", words=("--fsdp",))
CONTENDERS = (WEFT_DP, DDP, WEFT_ZERO_3, FSDP2, WEFT_PP)
PAIRS = ((WEFT_DP, DDP), (WEFT_ZERO_3, FSDP2), (WEFT_PP, DDP))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def watched(words: list[str], out: Path) -> tuple[float, int]:
    """Run Python with `words` to its end; return when it began and the peak bytes of all its processes.

    Raises:
        SystemExit: with the end of its log when it fails.
    """
    environment = os.environ | {"WEFT_HOME": str(out.parent / "home"), "TOKENIZERS_PARALLELISM": "false"}
    log = out / "log"
    with log.open("w") as file:
        began_s = time.time()
        process = subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        with peaks_of(process.pid) as peaks:
            code = process.wait(LIMIT_S)
    if code:
        raise SystemExit(f"{' '.join(words[:4])} failed:\n{log.read_text()[-2_000:]}")
    return began_s, sum(peaks.values())


@contextmanager
def peaks_of(root: int) -> Iterator[dict[int, int]]:
    """Yield the peak bytes of each process under `root`, filled in while the block lasts."""
    peaks: dict[int, int] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(POLL_S):
            for process in tree(root):
                with suppress(OSError):  # it has ended
                    peaks[process] = max(peaks.get(process, 0), peak_bytes(process))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def tree(root: int) -> list[int]:
    """The process and all under it."""
    try:
        words = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return []
    return [root, *(one for child in words for one in tree(int(child)))]


def compare(report: Report, name: str, folder: Path, rounds: int) -> None:
    """Train one model with all contenders in turns, and report each, and ours over theirs."""
    set_seed(SEED)
    model = folder / "model"
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(model)
    text = folder / "text.txt"
    text.write_bytes(python_sources(TEXT_BYTES))
    trained: dict[Contender, list[Trained]] = {one: [] for one in CONTENDERS}
    for number in range(rounds):
        for place, one in enumerate(CONTENDERS[::-1] if number % 2 else CONTENDERS):
            trained[one].append(one.train(model, text, folder / f"{number}-{place}"))
    losses = [one.loss for runs in trained.values() for one in runs]
    if max(losses) > (1 + SAME_LOSS) * min(losses):
        raise SystemExit(f"{name}: the programs do not train the same: losses {min(losses)} to {max(losses)}")
    for one, runs in trained.items():
        report.add_cell(f"{name}, {one.name}", figures_of(runs))
    for ours, theirs in PAIRS:
        ratios = [
            a.tokens_per_s / b.tokens_per_s for a, b in zip(trained[ours], trained[theirs], strict=True)
        ]
        median = statistics.median(ratios)
        speed = Value(median, "ratio", TARGET, median >= TARGET, min(ratios), max(ratios))
        report.add_cell(f"{name}, {ours.name} over {theirs.name}", {"tokens/s": speed})


def figures_of(runs: list[Trained]) -> dict[str, Value]:
    return {
        "tokens": Value.of_repeats([one.tokens_per_s for one in runs], "per s"),
        "peak memory": Value.of_repeats([float(one.peak_bytes) for one in runs], "bytes"),
        "start-up": Value.of_repeats([one.start_up_s for one in runs], "s"),
    }


def say_torchtitan(report: Report) -> None:
    """Say why torchtitan's trainer is left out, by its own error: 0.3.0 starts on no CPU build of torch."""
    try:
        number = version("torchtitan")
    except PackageNotFoundError:
        report.say("torchtitan is left out: pip install torchtitan")
        return
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    words = [
        "-m",
        "torchtitan.train",
        "--module",
        "llama3",
        "--config",
        "llama3_debugmodel",
        "--training.steps",
        "1",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *ranks, *words]
        started = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    errors = [line for line in started.stderr.splitlines() if re.match(r"(\[rank0\]: )?\w+Error: ", line)]
    report.say(f"torchtitan {number} is left out: {errors[0] if errors else 'no comparison is written'}")


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("models", nargs="*", metavar="MODEL", choices=[*MODELS, []], help=", ".join(MODELS))
    made.add_argument("--rounds", type=int, default=ROUNDS, help="whole trainings of each program")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("training_beside", asked)
    report.print_machine()
    say_torchtitan(report)
    try:
        report.say(f"accelerate {version('accelerate')}, transformers {version('transformers')}")
    except PackageNotFoundError:
        report.say("everything is left out: pip install accelerate")
        return
    for name in asked.models or MODELS:
        if report.missing(f"{name}, {PAIRS[-1][0].name} over {PAIRS[-1][1].name}"):
            with tempfile.TemporaryDirectory() as folder:
                compare(report, name, Path(folder), asked.rounds)


if __name__ == "__main__":
    main()
