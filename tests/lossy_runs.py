"""Small runs of CSER that go on where replicas are lost (`dying_task`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from run_inputs import CONFIG, cluster_text

EVERY = 4
RUN = """
[model]
hf = "{folder}/config.json"
[task]
kind = "{kind}"
data = "{folder}/text.txt"
[train]
steps = {steps}
global_batch = {batch}
precision = "fp64"
[optimizer]
name = "adamw"
[cluster]
use = "{folder}/cluster.toml"
[goal]
contract = "empirical"
[sync]
method = "cser"
update_ratio = 4
reset_ratio = 2
every = {every}
keep_errors = true
{sync}
[plan]
pp = {pp}
tp = {tp}
schedule = "1f1b"
dp = {replicas}
micro_batch_size = 2
[checkpoint]
every = {checkpoint_every}
"""


def write_run_file(
    folder: Path,
    *,
    steps: int,
    replicas: int = 3,
    pp: int = 1,
    tp: int = 1,
    sync: str = "",
    checkpoint_every: int = 1000,
    on_death: str = "go-on",
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "lives").mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("the weft goes under and over the warp\n" * 100)
    (folder / "cluster.toml").write_text(cluster_text(replicas * pp * tp, precision="fp64"))
    path = folder / "run.toml"
    kind = "dying_task:Dies" if on_death == "go-on" else "causal-lm"
    table = f'[run]\non_death = "{on_death}"\n'
    values = {
        "kind": kind,
        "steps": steps,
        "batch": 2 * replicas,
        "every": EVERY,
        "replicas": replicas,
        "pp": pp,
        "tp": tp,
        "sync": sync,
    }
    path.write_text(RUN.format(folder=folder, checkpoint_every=checkpoint_every, **values) + table)
    return path


def train(
    source: Path, directory: Path, deaths: str = "", *more: str, join_at: int | None = None
) -> subprocess.CompletedProcess[str]:
    """What `weft train` says, in processes that die so; new ones join by the first reset from a step on."""
    command = [sys.executable, "-m", "weft", "train", str(source), *more]
    if source.is_file():
        command += ["--directory", str(directory)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    lives = directory.parent / "lives"
    home = {"PYTHONPATH": path, "WEFT_HOME": str(directory.parent / "home"), "LIVES": str(lives)}
    home |= {"JOIN_AT": str(1_000_000 if join_at is None else join_at), "DEATHS": deaths}
    return subprocess.run(command, env={**os.environ, **home}, capture_output=True, text=True, timeout=300)


def lives(directory: Path, rank: int) -> list[int]:
    """The process ids that a rank has had."""
    return [int(line) for line in (directory.parent / "lives" / str(rank)).read_text().split()]
