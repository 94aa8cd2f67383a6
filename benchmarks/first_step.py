"""From the command to the end of the first step, beside a bare script; and how ranks find each other.

    python benchmarks/first_step.py                    # both, about four minutes
    python benchmarks/first_step.py --only beside      # eight ranks beside torchrun with DDP
    python benchmarks/first_step.py --only meeting     # groups of all ranks by their number

Eight CPU ranks train a GPT of 1M parameters. The bare script has `transformers`' model under
DistributedDataParallel, torch's AdamW and random tokens: no plan, data, checkpoint or record. weft plans,
reads text, and takes the loss of held-out samples before its first step. Rounds take turns.

A run has some gloo groups of all ranks. Each rank connects with all others; among many ranks, with those that
it meets. The processor seconds of a rank are measured while it opens the groups, and fitted by the number
of ranks. Rank 0 also has the store.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser
from transformers import GPT2Config, GPT2LMHeadModel

from weft.describe.toml_table import table_text
from weft.run.launch.worker_start import ON_DEMAND
from weft.training.directory.run_directory import RunDirectory

RANKS, SEQUENCE, SAMPLES = 8, 64, 4
ROUNDS, LIMIT_S, POLL_S = 5, 300.0, 0.01
TARGET = 1.2
# The world, the losses, the votes about a stop, and the checkpoints.
GROUPS = 4
# By whether connections are made on demand: the numbers of ranks.
SIZES = {False: (8, 16, 32, 64), True: (32, 64, 128)}
MANY, PORT_DIGITS = 4096, 5
# By name: the unit, and the power of the number of ranks with which a figure grows. Each rank asks the store
# for the address of each other one.
FIGURES = {"a rank": ("s", 1), "rank 0 with the store": ("s", 2), "open files": ("", 1)}
VOCABULARY = 256
CONFIG = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=SEQUENCE,
    n_embd=128,
    n_layer=4,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    tie_word_embeddings=False,
)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--only", choices=("beside", "meeting"))
    made.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--meet", type=int, metavar="RANKS", help=argparse.SUPPRESS)
    return made


def main() -> None:
    asked = options().parse_args()
    if asked.bare:
        bare()
        return
    if asked.meet:
        print(json.dumps(met(asked.meet)))
        return
    report = Report("first_step", asked)
    report.print_machine()
    if asked.only != "meeting":
        beside(report)
    if asked.only != "beside":
        meetings(report)


def beside(report: Report) -> None:
    cell = f"first step, {RANKS} ranks"
    if not report.missing(cell):
        return
    found: dict[str, list[float]] = {"weft": [], "DDP": []}
    with tempfile.TemporaryDirectory(prefix="weft-first-") as folder:
        run = written(Path(folder))
        for number in range(ROUNDS + 1):
            for name, start in (("weft", of_weft), ("DDP", of_bare)):
                seconds = start(run, number)
                # The first round fills caches: bytecode, the page cache, and weft's data.
                found[name] += [seconds] if number else []
    weft_s, bare_s = (statistics.median(one) for one in found.values())
    ratio = Value(weft_s / bare_s, "ratio", target=TARGET)
    report.add_cell(
        cell, {"weft": Value(weft_s, "s"), "torchrun with DDP": Value(bare_s, "s"), "ratio": ratio}
    )


def written(folder: Path) -> Path:
    """A run file of eight replicas on this machine's cores, and what it names."""
    CONFIG.to_json_file(folder / "config.json")
    (folder / "text.txt").write_text("the weft goes under and over the warp\n" * 5_000)
    tables: Mapping[str, Mapping[str, str | int]] = {
        "model": {"hf": str(folder / "config.json")},
        "task": {"kind": "causal-lm", "data": str(folder / "text.txt"), "sequence": SEQUENCE},
        "train": {"global_batch": RANKS * SAMPLES, "steps": 1, "precision": "fp32"},
        "cluster": {"use": str(folder / "cluster.toml")},
        "plan": {"pp": 1, "dp": RANKS, "micro_batch_size": SAMPLES},
    }
    (folder / "run.toml").write_text(
        "\n".join(table_text(f"[{name}]", keys) for name, keys in tables.items())
    )
    (folder / "cluster.toml").write_text(
        f"""name = "cores"
[[node]]
name = "all"
device = "core"
devices = {RANKS}
bandwidth = "1 GB/s"
latency = "50 us"
[device.core]
flops = {{ fp32 = "20 GFLOP/s" }}
memory = "2 GB"
memory_bandwidth = "5 GB/s"
launch = "1 us"
synchronous = true
"""
    )
    return folder / "run.toml"


def of_weft(run: Path, number: int) -> float:
    """Seconds until the first step has its line; the run then ends by itself."""
    out = run.parent / f"run-{number}"
    command = [sys.executable, "-m", "weft", "train", str(run), "--directory", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WEFT_HOME": str(run.parent / "home")}
    return seconds_until(command, environment, lambda: len(RunDirectory(out).metrics()) > 0)


def of_bare(run: Path, number: int) -> float:
    marks = run.parent / f"bare-{number}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return seconds_until(
        [*command, __file__, "--bare"],
        os.environ | {"OMP_NUM_THREADS": "1", "MARK": str(marks)},
        marks.exists,
    )


def seconds_until(command: list[str], environment: Mapping[str, str], reached: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while not reached():
            assert process.poll() in (None, 0), process.communicate()[1].decode()
            assert time.monotonic() - began_s < LIMIT_S, "no step comes"
            time.sleep(POLL_S)
        seconds = time.monotonic() - began_s
        process.communicate(timeout=LIMIT_S)
    return seconds


def bare() -> None:
    """One rank of the bare script."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(GPT2LMHeadModel(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(os.environ["MARK"]).touch()
    dist.destroy_process_group()


def meetings(report: Report) -> None:
    """What a rank spends on groups of all ranks, and what that makes for thousands of ranks."""
    report.say(f"{GROUPS} gloo groups of all ranks; processor seconds; medians of all ranks but rank 0")
    for on_demand, sizes in SIZES.items():
        for ranks in sizes:
            if report.missing(cell := shape_of(ranks, on_demand)):
                figures = zip(FIGURES.items(), measured(ranks, on_demand), strict=True)
                report.add_cell(cell, {name: Value(one, unit) for (name, (unit, _)), one in figures})
        if report.missing(cell := f"{shape_of(MANY, on_demand)}, by the law"):
            rows = [report.values(shape_of(ranks, on_demand)) for ranks in sizes]
            report.add_cell(
                cell,
                {
                    name: Value(at_many(sizes, [row[name] for row in rows], degree), unit)
                    for name, (unit, degree) in FIGURES.items()
                },
            )


def shape_of(ranks: int, on_demand: bool) -> str:
    return f"{ranks} ranks{', on demand' * on_demand}"


def at_many(sizes: Sequence[int], figures: list[float], degree: int) -> float:
    """The figure of `MANY` ranks, which grows with this power of their number."""
    terms = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float) ** degree], axis=1)
    constant, factor = np.linalg.lstsq(terms, np.array(figures), rcond=None)[0]
    return float(constant + max(factor, 0.0) * MANY**degree)


def measured(ranks: int, on_demand: bool) -> list[float]:
    # torch looks up the name of each address that connects, and slow answers would hold up the store.
    environment = os.environ | {"RES_OPTIONS": "attempts:1 timeout:1", ON_DEMAND: str(int(on_demand))}
    command = [sys.executable, __file__, "--meet", str(ranks)]
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found: list[float] = json.loads(told.splitlines()[-1])
    return found


def met(ranks: int) -> list[float]:
    """Open the groups in so many processes, which are copies of this one; return the `FIGURES`."""
    torch.set_num_threads(1)
    reading, writing = os.pipe()
    asking, telling = os.pipe()
    children = []
    # A copy of a process whose store has threads already may wait forever for a lock of theirs.
    for rank in range(1, ranks):
        if (child := os.fork()) == 0:
            os.close(reading)
            port = int(os.read(asking, PORT_DIGITS))
            told = one_rank(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=LIMIT_S)), rank, ranks)
            os.write(writing, json.dumps(told).encode() + b"\n")
            os._exit(0)
        children.append(child)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(telling, f"{store.port:0{PORT_DIGITS}}".encode() * len(children))
    os.close(writing)
    own = one_rank(store, 0, ranks)
    with os.fdopen(reading) as lines:
        others = [json.loads(line) for line in lines]
    for child in children:
        os.waitpid(child, 0)
    seconds, files = zip(*others, strict=True)
    return [statistics.median(seconds), own[0], statistics.median(files)]


def one_rank(store: dist.Store, rank: int, ranks: int) -> tuple[float, int]:
    """Return the processor seconds of a rank, all threads together, and its open files."""
    began_s = time.process_time()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S)
    )
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S)) for _ in range(GROUPS - 1)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier(group=group)
    found = time.process_time() - began_s, len(os.listdir("/proc/self/fd"))
    # Nobody leaves while others still connect.
    store.add("ended", 1)
    while store.add("ended", 0) < ranks:
        time.sleep(POLL_S)
    return found


if __name__ == "__main__":
    main()
