"""Mixtures of experts whose balance counts few tokens or many: losses, and experts of each source.

    python scopes.py [--quick] [--folder runs/experts] [--jobs 2]

Two layers, 64 wide, 8 experts, 2 for each byte; 64 samples of 64 bytes in a step, of four sources. In
"single" data, each 4 samples after each other are of one source, as in a micro-batch of a large run. In
"mixed" data, they are of any. Each training is a run of `weft train`. A run that is done is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import Any

from corpora import SOURCES, write_sources
from probes import probes

BATCH, SEQUENCE, BLOCK, EXPERTS = 64, 64, 4, 8
STEPS, QUICK_STEPS = 1500, 150
HIGH = 0.02
WEIGHTS = (HIGH, 0.008, 0.001, 0.004)
SEEDS = (0, 1, 2, 3, 4)

Balance = tuple[tuple[str, Any], ...]


def counted(samples: int) -> Balance:
    """Count the experts of this many samples."""
    return ("balance", "micro-batch"), ("samples", samples)


GLOBAL: Balance = (("balance", "global-batch"),)
BUFFER: Balance = (("balance", "buffer"), ("samples", BLOCK), ("replicas", 1))
SEQUENCES: Balance = (("balance", "sequence"),)
NONE: Balance = (("balance", "none"),)
MICRO = counted(BLOCK)


@dataclass(frozen=True)
class Cell:
    """One training; `later` is the balance of the second half, if it is another."""

    name: str
    balance: Balance
    weight: float = 0.008
    single: bool = True
    chosen: int = 2
    seed: int = 0
    later: Balance | None = None

    @property
    def folder(self) -> str:
        data = "single" if self.single else "mixed"
        return f"{self.name}-{self.weight:g}-{data}-top{self.chosen}-{self.seed}".replace(" ", "-")


def cells(quick: bool) -> list[Cell]:
    """Return all trainings, those that tell most first."""
    scopes = [Cell("micro-batch", MICRO), Cell("global-batch", GLOBAL)]
    micro, wide = (replace(one, weight=HIGH) for one in scopes)
    if quick:
        return [micro, wide, Cell("none", NONE)]
    scopes += [Cell("buffer", BUFFER), Cell("sequence", SEQUENCES)]
    # As a balance of 2, 4 and 8 replicas with a micro-batch each.
    scopes += [Cell(f"{count} micro-batches", counted(count * BLOCK)) for count in (2, 4, 8)]
    return [
        *(replace(one, weight=HIGH) for one in scopes),
        Cell("none", NONE),
        *(replace(one, seed=seed) for seed, one in product(SEEDS[1:], (micro, wide))),
        *(replace(one, single=False) for one in (micro, wide)),
        replace(micro, name="micro-batch, then global-batch", later=GLOBAL),
        replace(wide, name="global-batch, then micro-batch", later=MICRO),
        *(replace(one, chosen=4) for one in (micro, wide)),
        *(replace(one, weight=weight) for weight, one in product(WEIGHTS[1:], scopes)),
    ]


@dataclass(frozen=True)
class Result:
    """What a run's held-out text and its last steps showed.

    Attributes:
        loss: nats per byte, the mean of all sources.
        spread: standard deviation over sources of the share of tokens that choose an expert; mean of experts.
        favourite: the share of a source's tokens that choose its most chosen expert; mean of layers.
        scores: the sum of the scores of a token's experts.
        violation: tokens of a step's busiest expert over the mean, less one.
        answers: shares of right answers to probes.
    """

    cell: Cell
    loss: float
    perplexities: dict[str, float]
    spread: float
    favourite: float
    scores: float
    violation: float
    answers: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Cell, run: Path, sources: dict[str, Path]) -> Result:
        told = json.loads((run / "evaluation.json").read_text())
        parts = {name: told["by_source"][str(path)] for name, path in sources.items()}
        layers = [one["experts"] for one in parts.values()]
        # By source, layer and expert: the share of tokens that choose it.
        rates = [[layer["rates"] for layer in own] for own in layers]
        by_expert = [list(zip(*of_layer, strict=True)) for of_layer in zip(*rates, strict=True)]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = rows[-max(1, len(rows) // 10) :]
        return cls(
            cell,
            statistics.fmean(one["loss"] for one in parts.values()),
            {name: one["perplexity"] for name, one in parts.items()},
            statistics.fmean(statistics.pstdev(one) for of_layer in by_expert for one in of_layer),
            statistics.fmean(max(one) for own in rates for one in own),
            statistics.fmean(layer["chosen_scores"] for own in layers for layer in own),
            statistics.fmean(row["expert_violation"] for row in last),
            probes(run, sources["python"]),
        )


def train(cell: Cell, folder: Path, sources: dict[str, Path], steps: int) -> Path:
    """Train a cell in its folder, or find it there, and evaluate it."""
    run = folder / cell.folder
    if (run / "evaluation.json").exists():
        return run
    # A run that was cut short begins anew.
    rmtree(run, ignore_errors=True)
    model = _model(folder, cell.chosen)
    half = steps // 2 if cell.later else steps
    first = _run_file(folder / f"{cell.folder}.toml", cell, cell.balance, model, sources, half, steps)
    _weft("train", str(first), "--directory", str(run))
    if cell.later:
        path = folder / f"{cell.folder}-later.toml"
        _weft(
            "train",
            str(_run_file(path, cell, cell.later, model, sources, steps, steps)),
            "--resume",
            str(run),
        )
    _weft("eval", str(run))
    return run


def _weft(*words: str) -> None:
    # Two trainings share the cores of a small machine: each computes on one thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *words], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"weft {' '.join(words)}: {done.stderr.strip()}")


def _model(folder: Path, chosen: int) -> Path:
    own = folder / f"top{chosen}"
    own.mkdir(exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": chosen}
    about = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "tie_word_embeddings": True}
    (own / "config.json").write_text(json.dumps({**about, **sizes, **heads, **experts}))
    return own


def _run_file(
    path: Path,
    cell: Cell,
    balance: Balance,
    model: Path,
    sources: dict[str, Path],
    steps: int,
    all_steps: int,
) -> Path:
    by_index = ("balance", "buffer") in balance
    keys = dict(balance) if dict(balance)["balance"] == "none" else {**dict(balance), "weight": cell.weight}
    tables: dict[str, dict[str, Any]] = {
        "model": {"hf": str(model)},
        "task": {"sequence": SEQUENCE, **({"source_block": BLOCK} if cell.single else {})},
        "task.data": {str(source): 1 for source in sources.values()},
        "train": {"global_batch": BATCH, "steps": steps, "seed": cell.seed},
        "optimizer": {
            "learning_rate": 3e-3,
            "warm_up_steps": all_steps // 20,
            "schedule": "cosine",
            "decay_steps": all_steps,
            "final_learning_rate": 3e-4,
        },
        "experts": keys,
        # Balances of few samples do not depend on the plan's micro-batches, but for a buffer.
        "plan": {"dp": 1, "pp": 1, "tp": 1, "micro_batch_size": BLOCK if by_index else BATCH},
        "checkpoint": {"every": all_steps},
    }
    lines = [
        "\n".join(
            [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())]
        )
        for name, table in tables.items()
    ]
    path.write_text("\n\n".join(lines) + "\n")
    return path


HEAD = (
    *("balance", "weight", "data", "loss", *SOURCES),
    *("spread", "favourite", "scores", "violation", "brackets", "digits"),
)


def line(texts: Sequence[str]) -> str:
    first, *others = texts
    return f"{first:<31}" + "".join(f"{one:>10}" for one in others)


def row(result: Result) -> list[str]:
    cell = result.cell
    data = ("single" if cell.single else "mixed") + ("" if cell.chosen == 2 else f" top {cell.chosen}")
    figures = (result.loss, *result.perplexities.values(), result.spread)
    return [
        *(cell.name, "-" if cell.balance == NONE else f"{cell.weight:g}", data),
        *(f"{one:.4f}" for one in figures),
        *(f"{result.favourite:.1%}", f"{result.scores:.3f}", f"{result.violation:.3f}"),
        *(f"{one:.1%}" for one in result.answers.values()),
    ]


def compared(results: Sequence[Result]) -> str:
    """Return the paired difference of both scopes over seeds."""
    losses = {
        name: {one.cell.seed: one.loss for one in results if _is_finalist(one.cell, name)}
        for name in ("global-batch", "micro-batch")
    }
    seeds = sorted(losses["global-batch"].keys() & losses["micro-batch"].keys())
    apart = [losses["global-batch"][seed] - losses["micro-batch"][seed] for seed in seeds]
    each = ", ".join(f"{one:+.4f}" for one in apart)
    mean = statistics.fmean(apart)
    return f"global-batch less micro-batch, weight {HIGH}, {len(seeds)} seeds: mean {mean:+.4f} ({each})"


def _is_finalist(cell: Cell, name: str) -> bool:
    return cell.name == name and cell.weight == HIGH and cell.single and cell.chosen == 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"three trainings of {QUICK_STEPS} steps")
    parser.add_argument("--steps", type=int, help=f"of each training; {STEPS} if not given")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/experts"), help="where runs are kept")
    given = parser.parse_args()
    steps = given.steps or (QUICK_STEPS if given.quick else STEPS)
    folder = given.folder.resolve() / str(steps)
    folder.mkdir(parents=True, exist_ok=True)
    sources = write_sources(given.folder.resolve() / "text")
    print(line(HEAD), flush=True)
    results: list[Result] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        asked = cells(given.quick)
        runs = pool.map(lambda cell: train(cell, folder, sources, steps), asked)
        for cell, run in zip(asked, runs, strict=True):
            results.append(Result.of(cell, run, sources))
            print(line(row(results[-1])), flush=True)
    print(compared(results))


if __name__ == "__main__":
    main()
