"""Runs of a mixture on two expert ranks: with experts where they are, and with `move_every`.

Without a balance, a router prefers a few experts. The rank that has most of them makes the other one wait.
Both runs end with the same loss, to the bit; what differs is the time of a step. Rounds go back and forth
between the two. Steps before the first decision are left out.

    python benchmarks/expert_moves.py             # about four minutes on two cores
    python benchmarks/expert_moves.py --quick     # one round of fewer steps
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from figures import Value
from harness import Report, python_sources, quick_parser

ROUNDS, STEPS, EVERY = 3, 80, 10
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
RUN = """
[model]
hf = "config.json"
[task]
data = "text.txt"
sequence = 128
[train]
global_batch = 16
steps = {steps}
precision = "fp32"
[plan]
ep = 2
micro_batch_size = 8
schedule = "gpipe"
[experts]
balance = "none"
"""


class Trained(NamedTuple):
    """The metrics of a run's steps, its moves, and its last loss."""

    metrics: list[dict[str, Any]]
    moves: list[dict[str, Any]]
    loss: float

    def median_s(self) -> float:
        """The median step after the first decision."""
        return statistics.median(float(row["step_s"]) for row in self.metrics[EVERY:])

    def busiest(self) -> float:
        return statistics.mean(float(row["busiest_expert_rank"]) for row in self.metrics[EVERY:])


def options() -> argparse.ArgumentParser:
    return quick_parser(__doc__)


def main() -> int:
    asked = options().parse_args()
    report = Report("expert_moves", asked)
    report.print_machine()
    rounds, steps = (1, 30) if asked.quick else (ROUNDS, STEPS)
    cell = f"8 experts on 2 ranks, {steps} steps, a decision every {EVERY}"
    if not report.missing(cell):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.json").write_text(json.dumps(CONFIG))
        (place / "text.txt").write_bytes(python_sources(2_000_000))
        pairs = [
            (train(place, steps, ""), train(place, steps, f"move_every = {EVERY}\n")) for _ in range(rounds)
        ]
    same = all(one.loss == other.loss for one, other in pairs)
    report.add_cell(cell, figures(pairs) | {"equal losses": Value(float(same), "count", met=same)})
    return 0 if same else 1


def figures(pairs: list[tuple[Trained, Trained]]) -> dict[str, Value]:
    """The times of both runs, and what was predicted and measured of the moves."""
    stayed_s, moved_s = ([one.median_s() for one in each] for each in zip(*pairs, strict=True))
    ratios = [moved / stayed for stayed, moved in zip(stayed_s, moved_s, strict=True)]
    moves = [move for _, moved in pairs for move in moved.moves]
    return {
        "step, experts stay": Value.of_repeats(stayed_s, "s"),
        "step, experts move": Value.of_repeats(moved_s, "s"),
        "ratio of steps": Value.of_repeats(ratios, "ratio", target=1.0),
        "busiest rank over the mean, experts stay": Value.of_repeats(
            [one.busiest() for one, _ in pairs], "ratio"
        ),
        "busiest rank over the mean, experts move": Value.of_repeats(
            [one.busiest() for _, one in pairs], "ratio"
        ),
        "moves of a run": Value(len(moves) / len(pairs), "count"),
        "a move, predicted": Value(statistics.median(one["move_s"] for one in moves), "s"),
        "a move, measured": Value(statistics.median(one["took_s"] for one in moves), "s"),
        "a decision": Value(statistics.median(one["decided_s"] for one in moves), "s"),
    }


def train(folder: Path, steps: int, keys: str) -> Trained:
    (folder / "run.toml").write_text(RUN.format(steps=steps) + keys)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        command = [sys.executable, "-m", "weft", "train", "run.toml", "--directory", directory]
        environment = os.environ | {"WEFT_HOME": str(folder / "home")}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        run = Path(directory)
        metrics, events = (
            [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "events")
        )
        summary = json.loads((run / "summary.json").read_text())
    moves = [event for event in events if event["event"] == "experts moved"]
    return Trained(metrics, moves, summary["final_loss"])


if __name__ == "__main__":
    sys.exit(main())
