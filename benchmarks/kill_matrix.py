"""Ranks of `weft train` killed at random moments: every run, resumed, ends like one that nobody killed.

Each seed draws a plan, and for each of its kills a rank and a moment: while it trains, while it saves, or
while it loads. Equal means: the loss of every step and every byte of the last checkpoint's tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from harness import Report, parser

STEPS, EVERY, KILLS = 24, 2, 2
LIMIT_S = 300.0
PLANS = {
    "1f1b, pp 2": 'pp = 2\ndp = 1\nschedule = "1f1b"',
    "gpipe, dp 2, zero-1": 'pp = 1\ndp = 2\nschedule = "gpipe"\nsharding = "zero-1"',
    "breadth-first, dp 2, zero-2": (
        'pp = 1\ndp = 2\nloops = 2\nschedule = "breadth-first"\nsharding = "zero-2"'
    ),
}
RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{data}"
sequence = 32
[train]
global_batch = 8
steps = {steps}
precision = "fp32"
[plan]
micro_batch_size = 2
{plan}
[checkpoint]
every = {every}
"""
MOMENTS = ("training", "saving", "loading")

Outcome = tuple[dict[int, float], dict[str, bytes]]


def train(source: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weft", "train", str(source), *options, "--json"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def workers(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks, in no order."""
    try:
        below = psutil.Process(launcher.pid).children(recursive=True)
        return [process for process in below if process.name().startswith("weft-rank-")]
    except psutil.Error:
        return []


def wait_until(happened: Callable[[], bool], launcher: subprocess.Popen[str]) -> bool:
    """Whether it happened while the run was under way."""
    deadline = time.monotonic() + LIMIT_S
    while launcher.poll() is None and time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.002)
    return False


def moment_of(kind: str, run_dir: Path, draw: random.Random) -> Callable[[], bool]:
    """A condition that becomes true at a random moment of that kind, in a start that is about to begin."""
    metrics, checkpoints, slots = run_dir / "metrics.jsonl", run_dir / "checkpoints", run_dir / "slots"
    before = _lines(metrics)
    if kind == "training":
        steps = draw.randint(1, STEPS // 2)
        return lambda: _lines(metrics) >= before + steps
    if kind == "saving":
        left = draw.randint(1, 40)
        seen = [0]

        def saving() -> bool:
            seen[0] += any(checkpoints.glob(".saving-*"))
            return seen[0] >= left

        return saving
    # The slots are made anew just before a rank loads.
    old = {path: path.stat().st_mtime_ns for path in slots.glob("*.slots")}
    return lambda: any(path.stat().st_mtime_ns != old.get(path) for path in slots.glob("*.slots"))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def outcome(run_dir: Path) -> Outcome:
    """The loss of every step, and the tensors of the last checkpoint."""
    from safetensors.torch import load_file

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = (run_dir / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")
    tensors = {name: value.numpy().tobytes() for file in files for name, value in load_file(file).items()}
    return {row["step"]: row["loss"] for row in rows}, tensors


def finish(source: Path, *options: str) -> None:
    with train(source, *options) as launcher:
        _, errors = launcher.communicate(timeout=LIMIT_S)
    if launcher.returncode:
        raise SystemExit(f"{source}: exit code {launcher.returncode}: {errors}")


def kill_and_resume(source: Path, run_dir: Path, draw: random.Random) -> list[str]:
    """Start the run, kill a rank, `KILLS` times; then let it end. What was killed when."""
    told: list[str] = []
    for start in range(KILLS):
        kind = draw.choice(MOMENTS if start else MOMENTS[:2])
        place, delay_s = draw.random(), draw.uniform(0.0, 0.3 if kind == "loading" else 0.02)
        options = (str(source), "--directory", str(run_dir)) if start == 0 else (str(run_dir),)
        condition = moment_of(kind, run_dir, draw)
        with train(Path(options[0]), *options[1:]) as launcher:
            reached = wait_until(condition, launcher)
            time.sleep(delay_s)
            ranks = sorted(workers(launcher), key=lambda process: process.pid)
            if reached and ranks:
                ranks[int(place * len(ranks))].kill()
            began_s = time.monotonic()
            launcher.communicate(timeout=LIMIT_S)
        state = "was over" if launcher.returncode == 0 else f"ended in {time.monotonic() - began_s:.1f} s"
        left = [path.name for path in (run_dir / "checkpoints").glob(".saving-*")]
        told.append(f"{kind} ({state}{', inside a save' if left else ''})")
        if launcher.returncode == 0:
            break
    finish(run_dir)
    return told


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=6)
    made.add_argument("--first", type=int, default=0)
    return made


def main() -> int:
    asked = options().parse_args()
    report = Report("kill_matrix", asked)
    report.print_machine()
    seeds = range(asked.first, asked.first + asked.seeds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["WEFT_HOME"] = str(folder / "home")
        (folder / "text.txt").write_text("the weft goes under and over the warp\n" * 2000)
        expected: dict[str, Outcome] = {}
        for seed in seeds:
            if report.missing(f"seed {seed}"):
                one_seed(report, seed, folder, expected)
    different = sum(report.values(f"seed {seed}")["failed"] for seed in seeds)
    report.say(f"{len(seeds) - different:.0f} of {len(seeds)} runs end like one that nobody killed")
    return 1 if different else 0


def one_seed(report: Report, seed: int, folder: Path, expected: dict[str, Outcome]) -> None:
    """Kill and resume one run; `expected` has the ends of plans that nobody killed, each trained once."""
    draw = random.Random(seed)
    plan = draw.choice(list(PLANS))
    source = folder / f"plan-{list(PLANS).index(plan)}.toml"
    if plan not in expected:
        text = RUN.format(data=folder / "text.txt", steps=STEPS, plan=PLANS[plan], every=EVERY)
        source.write_text(text)
        finish(source, "--directory", str(folder / source.stem))
        expected[plan] = outcome(folder / source.stem)
    told = kill_and_resume(source, folder / f"seed-{seed}", draw)
    equal = outcome(folder / f"seed-{seed}") == expected[plan]
    report.say(f"seed {seed}: {plan}: {'; '.join(told)}: {'equal' if equal else 'DIFFERENT'}")
    report.add_outcome(f"seed {seed}", 1, int(not equal))


if __name__ == "__main__":
    sys.exit(main())
