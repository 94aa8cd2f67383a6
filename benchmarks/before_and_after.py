"""Plans, programs, predictions and trained weights of two checkouts, over one table of runs.

A change of the inside must not change what comes out. Each case runs through the commands of both checkouts:
`weft plan` for the searches, `weft train` for the runs. What is compared, all of it exactly:

* a search: every candidate with its layout, verdict, predicted step and peak;
* a run: the table of its program, each predicted instruction, every tensor of its last checkpoint.

    python benchmarks/before_and_after.py --before FOLDER             # about fifteen minutes on two cores
    python benchmarks/before_and_after.py --before FOLDER --only run  # cases whose names contain "run"
    python benchmarks/before_and_after.py --collect FILE              # this checkout's answers as JSON
    python benchmarks/before_and_after.py --before FILE               # compare with collected answers

FOLDER is another checkout, such as one that `git worktree add` makes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
from harness import Report, parser

HERE = Path(__file__).resolve().parents[1]

SEARCHES: Mapping[str, str] = {
    "plan gpt-1m 4 a100": "gpt-1m --on 4xa100-80gb",
    "plan llama-7b 16 a100": "llama-7b --on 16xa100-40gb",
    "plan llama-13b 8 a100": "llama-13b --on 8xa100-80gb",
    "plan llama-7b 8 l4 + 8 t4": "llama-7b --on 8xl4+8xt4 --precision fp16",
    "plan gpt2 8 a100 + 8 t4": "gpt2 --on 8xa100-80gb+8xt4 --precision fp16",
    "plan gpt2 zero-3 in islands": "gpt2 --on 16xa100-80gb --sharding zero-3 --island 8",
    "plan llama-7b cp 2": "llama-7b --on 8xa100-80gb --cp 2 --global-batch 32",
    "plan llama-3-8b recompute": "llama-3-8b --on 8xl4 --recompute full --global-batch 32",
    "plan resnet-50": "resnet-50 --on 4xa100-80gb",
    "plan bert-large chimera": "bert-large --on 8xa100-80gb --schedule chimera",
    "plan gpt-1m exhaustive": "gpt-1m --on 4xa100-80gb --planner exhaustive --pp 2 --dp 2 --loops 1",
}
PLANNERS = ("amp", "megatron", "uniform", "metis-form", "homogeneous")

# [plan] keys; a leading "optimizer." or "train." names another table.
RUNS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "run 1f1b": ("gpt-1m", {"pp": 2, "schedule": "1f1b"}),
    "run looped": ("gpt-1m", {"pp": 2, "dp": 2, "schedule": "breadth-first", "loops": 2}),
    "run zero-1": ("gpt-1m", {"dp": 2, "sharding": "zero-1"}),
    "run zero-2 looped": ("gpt-1m", {"pp": 2, "dp": 2, "loops": 2, "sharding": "zero-2"}),
    "run zero-3 looped": ("gpt-1m", {"pp": 2, "dp": 2, "loops": 2, "sharding": "zero-3"}),
    "run zero-3 layers": ("llama-1m", {"pp": 1, "dp": 2, "loops": 4, "sharding": "zero-3"}),
    "run islands": ("gpt-1m", {"dp": 4, "sharding": "zero-1", "island": 2}),
    "run clipped": ("gpt-1m", {"pp": 2, "dp": 2, "optimizer.clip_norm": 0.5}),
    "run clipped shards": ("llama-1m", {"pp": 2, "dp": 2, "sharding": "zero-2", "optimizer.clip_norm": 0.5}),
    "run recompute": ("gpt-1m", {"pp": 2, "recompute": ["full", "selective"]}),
    "run tensor": ("llama-1m", {"pp": 2, "tp": 2, "recompute": "selective"}),
    "run context": ("llama-1m", {"cp": 2, "dp": 2, "optimizer.clip_norm": 1.0}),
    "run zero bubble": ("gpt-1m", {"pp": 2, "schedule": "zb-h1", "dp": 2}),
    "run chimera": ("gpt-1m", {"pp": 2, "dp": 2, "schedule": "chimera"}),
    "run bf16 sgd": ("gpt-1m", {"pp": 2, "train.precision": "bf16", "optimizer.name": "sgd"}),
    "run images": ("resnet-tiny", {"dp": 2, "sharding": "zero-1"}),
}
STEPS = 3
RANKS = 4
CLUSTER = f"""name = "cores"
[[node]]
name = "host"
count = 1
device = "core"
devices = {RANKS}
bandwidth = "1 GB/s"
latency = "50 us"
[device.core]
memory = "4 GiB"
memory_bandwidth = "10 GB/s"
synchronous = true
[device.core.flops]
fp64 = 1e10
fp32 = 2e10
bf16 = 2e10
"""
TEXT = "".join(f"{number} {number * number % 977}\n" for number in range(4000))

Answers = dict[str, Any]


class Difference(NamedTuple):
    """One thing of one case that is not the same."""

    case: str
    what: str


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--before", type=Path)
    made.add_argument("--collect", type=Path)
    made.add_argument("--only", default="")
    return made


def main() -> int:
    made = options()
    asked = made.parse_args()
    if asked.collect is not None:
        asked.collect.write_text(json.dumps(dict(collect(HERE, asked.only)), indent=1))
        return 0
    if asked.before is None:
        made.error("give --before or --collect")
    report = Report("before_and_after", asked)
    report.print_machine()
    before = (
        json.loads(asked.before.read_text())
        if asked.before.is_file()
        else dict(collect(asked.before.resolve(), asked.only))
    )
    after = dict(collect(HERE, asked.only))
    different = 0
    for case, answer in after.items():
        found = list(differences(case, before.get(case, {}), answer))
        different += bool(found)
        words = f"DIFFERENT: {', '.join(one.what for one in found)}" if found else "equal"
        report.say(f"{case:<32} {words}")
    cell = f"cases with {asked.only!r} beside {asked.before.name}"
    report.add_outcome(cell, len(after), different)
    return 1 if different else 0


def differences(case: str, before: Answers, after: Answers) -> Iterator[Difference]:
    """What of a case differs between two checkouts."""
    for what in sorted({*before, *after}):
        if before.get(what) != after.get(what):
            yield Difference(case, what)


def collect(checkout: Path, only: str) -> Iterator[tuple[str, Answers]]:
    """The answers of one checkout's commands, case by case."""
    with tempfile.TemporaryDirectory() as folder:
        for case, words in SEARCHES.items():
            if only in case:
                yield case, search(checkout, Path(folder), words.split())
        for planner in PLANNERS:
            if only in (case := f"plan gpt2 by {planner}"):
                asked = ["gpt2", "--on", "8xa100-80gb", "--planner", planner]
                yield case, search(checkout, Path(folder), asked)
        for case, (model, keys) in RUNS.items():
            if only in case:
                yield case, run(checkout, Path(folder) / case.replace(" ", "-"), model, keys)


def search(checkout: Path, folder: Path, words: list[str]) -> Answers:
    """Every candidate of a search, by its layout."""
    answer = json.loads(command(checkout, folder, "plan", *words, "--json", "--top", "1000000"))
    keys = ("verdict", "step_s", "step_low_s", "peak_bytes", "bound_s", "estimate_s")
    return {
        f"{number:06} {one['layout']}": [one[key] for key in keys]
        for number, one in enumerate(answer["candidates"])
    }


def run(checkout: Path, folder: Path, model: str, keys: Mapping[str, Any]) -> Answers:
    """The program, the prediction and the trained weights of a run."""
    folder.mkdir()
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.toml").write_text(run_file(model, keys))
    directory = folder / "out"
    command(checkout, folder, "train", "run.toml", "--directory", str(directory))
    predicted = pyarrow.parquet.read_table(directory / "predicted.parquet")
    columns = {name: predicted[name].to_pylist() for name in predicted.column_names}
    return {
        "program": digest((directory / "program.txt").read_bytes()),
        **{
            f"predicted {name}": digest(repr(values)) for name, values in columns.items() if name != "plan_id"
        },
        **weights(directory),
    }


def weights(directory: Path) -> Answers:
    """Digests of the tensors of a run's newest checkpoint, whatever file each is in."""
    newest = max((directory / "checkpoints").iterdir())
    found: Answers = {}
    for file in sorted(newest.rglob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, tensor in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, end = (start + offset for offset in tensor["data_offsets"])
                kind = f"{tensor['dtype']} {tensor['shape']}".encode()
                found[f"tensor {name}"] = digest(kind + content[first:end])
    assert found, f"{newest} holds no tensors"
    return found


def run_file(model: str, keys: Mapping[str, Any]) -> str:
    """The text of a run file with the given keys."""
    image = model == "resnet-tiny"
    tables: dict[str, dict[str, Any]] = {
        "model": {"preset": model},
        "task": {"kind": "image-classification"} if image else {"sequence": 32, "data": "text.txt"},
        "train": {"global_batch": 16, "steps": STEPS, "seed": 1},
        "optimizer": {},
        "cluster": {"use": "cluster.toml"},
        "plan": {"pp": 1, "dp": 1, "micro_batch_size": 2},
    }
    for key, value in keys.items():
        table, _, name = key.rpartition(".")
        tables[table or "plan"][name] = value
    return "\n".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for table, values in tables.items()
    )


def command(checkout: Path, folder: Path, *words: str) -> str:
    """What a command of that checkout prints."""
    # Measurements of this machine must not get into one of them and not the other.
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "WEFT_HOME": str(folder / "home")}
    called = subprocess.run(
        [sys.executable, "-m", "weft", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if called.returncode:
        raise SystemExit(f"{checkout}: weft {' '.join(words)}\n{called.stdout}{called.stderr}")
    return called.stdout


def digest(content: bytes | str) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
