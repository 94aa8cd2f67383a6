"""Nodes in network namespaces that lose one of them: how soon the others end, and the rest that goes on.

`weft lab` makes four nodes of one device. Each has its own network, /dev/shm, run directory and WEFT_HOME.
Checkpoints are in a folder that all see. One node is killed with all its processes, or its network ends. Then
two nodes train on under another plan, from the newest checkpoint, with each sample once. A run that loses
nobody is beside them, whose checkpoints stay on their nodes.

    python benchmarks/node_losses.py    # as root, about five minutes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Value
from harness import Report, parser
from namespaces import reason_to_skip

NODES, STEPS, LIMIT_S = 4, 100_000, 600
# The last node is lost once this many steps have a checkpoint.
EVERY, LOST_AFTER = 10, 20
# TCP's probes take 50 s to notice a machine that vanishes.
TARGETS_S = {"killed": 15.0, "cut off": 60.0}
CLUSTER = """
name = "nodes-{nodes}"
[[node]]
name = "all"
count = {nodes}
device = "core"
devices = 1
bandwidth = "1 GB/s"
latency = "50 us"
[[link]]
between = ["all", "all"]
bandwidth = "100 MB/s"
latency = "50 us"
[device.core]
flops = {{ fp32 = "50 GFLOP/s" }}
memory = "4 GB"
memory_bandwidth = "10 GB/s"
launch = "1 us"
synchronous = true
"""
RUN = """
[model]
preset = "gpt-1m"
[task]
data = "python-stdlib"
sequence = 64
[train]
global_batch = 16
steps = {steps}
[checkpoint]
every = {every}
{directory}
[cluster]
use = "{cluster}"
[plan]
pp = 2
dp = {dp}
micro_batch_size = 2
"""
# One node: own mounts and shared memory. The last one loses itself, and notes when.
NODE = """
set -u
cd {folder}/node-$NODE_RANK
mount -t tmpfs none /dev/shm
export WEFT_HOME=$PWD/home OMP_NUM_THREADS=1
{python} -m torch.distributed.run \\
    --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $LOCAL_WORLD_SIZE \\
    --master-addr $MASTER_ADDR --master-port $MASTER_PORT -m weft.training.worker run > output 2>&1 &
agent=$!
if [ $NODE_RANK = $LOST ]; then
    for _ in $(seq 1200); do sleep 0.1; [ -e run/checkpoints/{reached}/manifest.json ] && break; done
    sleep 1
    date +%s.%N > {folder}/lost
    if [ "$HOW" = killed ]; then
        pkill -KILL -P $agent; kill -KILL $agent
    else
        for one in $(tail -n +3 /proc/self/net/dev | cut -d: -f1 | tr -d ' ' | grep -v '^lo$'); do
            ip link set $one down
        done
    fi
fi
wait $agent
echo "$? $(date +%s.%N)" > ended
# The lab ends all commands after a failed one.
sleep {linger}
"""


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("node_losses", options().parse_args())
    report.print_machine()
    if (reason := reason_to_skip()) is not None:
        report.say(f"skipped: {reason}")
        return
    if report.missing("nobody lost"):
        with tempfile.TemporaryDirectory() as folder:
            report.add_cell("nobody lost", kept_apart(Path(folder)))
    for how in TARGETS_S:
        if report.missing(how):
            with tempfile.TemporaryDirectory() as folder:
                report.add_cell(how, lost(Path(folder), how))


def kept_apart(folder: Path) -> dict[str, Value]:
    """A run to its end, whose checkpoints stay on their nodes."""
    prepare(folder, nodes=NODES, steps=30)
    train(folder, NODES)
    losses = losses_of(folder)
    held = [{one.name for one in shards} for shards in checkpoints(folder)]
    apart = not any(one & other for one in held for other in held if one is not other)
    faults = [len(losses) != 30, not apart, not all(held)]
    return {
        "faults": Value(sum(faults), "count", 0),
        "steps of four nodes": Value(len(losses), "count"),
        "error of the clocks": Value(clock_error_s(folder), "s"),
    }


def lost(folder: Path, how: str) -> dict[str, Value]:
    """Seconds until the others have ended, and whether all name the lost rank and the rest goes on."""
    prepare(folder, nodes=NODES, steps=STEPS, shared=True)
    train(folder, NODES, how)
    since_s = float((folder / "lost").read_text())
    ended = [(folder / f"node-{number}" / "ended").read_text().split() for number in range(NODES - 1)]
    seconds = max(float(when) - since_s for _, when in ended)
    told = [(folder / f"node-{number}" / "output").read_text() for number in range(NODES - 1)]
    unnamed = sum(f"; rank {NODES - 1} is gone" not in text for text in told)
    before = len(losses_of(folder))
    reached = max(int(one.name.split("-")[1]) for one in (folder / "shared").glob("*/step-*"))
    prepare(folder, nodes=2, steps=reached + 10, resume=True, shared=True)
    train(folder, 2)
    after = losses_of(folder)
    return {
        "until all others have ended": Value(seconds, "s", TARGETS_S[how]),
        "ranks that do not name the lost one": Value(unnamed, "count", 0),
        "steps that are taken again": Value(before - reached, "count"),
        "steps of the rest that are missing": Value(reached + 10 - len(after), "count", 0),
    }


def prepare(folder: Path, *, nodes: int, steps: int, resume: bool = False, shared: bool = False) -> None:
    """Prepare the run on the first node, or have it resumed under another plan."""
    for number in range(nodes):
        (folder / f"node-{number}").mkdir(exist_ok=True)
    cluster, run = folder / f"cluster-{nodes}.toml", folder / f"run-{nodes}.toml"
    cluster.write_text(CLUSTER.format(nodes=nodes))
    directory = f'directory = "{folder}/shared"' if shared else ""
    dp = nodes // 2
    run.write_text(RUN.format(steps=steps, every=EVERY, directory=directory, cluster=cluster, dp=dp))
    where = str(folder / "node-0" / "run")
    words = ["--resume" if resume else "--directory", where, "--prepare-only"]
    subprocess.run([sys.executable, "-m", "weft", "train", str(run), *words], check=True, capture_output=True)


def train(folder: Path, nodes: int, how: str = "") -> None:
    """Run the prepared run on so many nodes of a lab; the last one is lost if `how` says so."""
    script = folder / "node.sh"
    reached = f"step-{LOST_AFTER:08d}"
    linger = 0 if not how else 70
    script.write_text(NODE.format(folder=folder, python=sys.executable, reached=reached, linger=linger))
    command = [sys.executable, "-m", "weft", "lab", str(folder / f"cluster-{nodes}.toml"), "--per-node", "--"]
    lost_rank = str(nodes - 1) if how else "none"
    subprocess.run(
        [*command, "unshare", "-m", "bash", str(script)],
        env=os.environ | {"LOST": lost_rank, "HOW": how},
        check=False,
        timeout=LIMIT_S,
        capture_output=True,
    )


def losses_of(folder: Path) -> dict[int, float]:
    lines = (folder / "node-0" / "run" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def checkpoints(folder: Path) -> list[list[Path]]:
    """The files of tensors that each node has of its newest checkpoint."""
    runs = (folder / f"node-{number}" / "run" / "checkpoints" for number in range(NODES))
    return [[*max(one.glob("step-*")).glob("shard-*")] for one in runs]


def clock_error_s(folder: Path) -> float:
    record = json.loads((folder / "node-0" / "run" / "slots" / "clocks.json").read_text())
    return float(max(error for each in record.values() for _, _, error in each)) / 1e9


if __name__ == "__main__":
    main()
