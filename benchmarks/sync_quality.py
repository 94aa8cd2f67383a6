"""Held-out losses of ways for replicas to agree, beside dense training: 4 layers, 64 wide, 2,000 steps.

Two ranks train a GPT on the bytes of Python's standard library. All methods see the same samples in the same
order for one seed, so differences to dense are paired. Each method has a grid of as many settings, with the
inner learning rate among them. It is searched with other seeds than those of the comparison. A control whose
replicas tell each other nothing shows that the comparison can tell methods apart.

With LANS, the methods are those of CLAN: gradients of 7 bits, of signs, and the largest of 1,000, both ways.

    python benchmarks/sync_quality.py                     # about a minute for each run of 2,000 steps
    python benchmarks/sync_quality.py --optimizer lans    # the same for CLAN
    python benchmarks/sync_quality.py --quick             # few steps and seeds: shows only that it works
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from figures import Value
from harness import Report, parser_of_trainings, run_trainings
from torch import nn

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.optimizers import KNOWN_OPTIMIZERS
from weft.describe.plan import Choice, Plan, Sharding
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_evaluation_part, compile_part
from weft.randomness import counter_seed
from weft.run.launch.worker_start import start_worker
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory, set_learning_rate

RANKS, GLOBAL_BATCH, TAU, STEPS = 2, 16, 12, 2000
MODEL = ModelConfig(
    name="gpt-quality",
    family="gpt",
    layers=4,
    hidden=64,
    heads=4,
    key_value_heads=4,
    feed_forward=256,
    vocabulary=256,
    sequence=64,
)
# Four rates, or two of them with two settings of the method.
RATES, OUTER_RATES = (1.5e-3, 3e-3, 6e-3, 1e-2), (3e-3, 6e-3)
LANS_RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)
TUNING_SEEDS, SEEDS = (100,), (0, 1, 2, 3, 4)
HELD_OUT_BATCHES = 40
# Student's t for a two-sided 95 % interval of five paired differences.
T_95 = 2.776
# In nats: a method's interval must end below it, the control's begin far above it.
GATE, CLAN_GATE = 0.01, 0.02
# Further losses of long runs, before their ends.
MARKS = (2000, 4000)


# An inner learning rate, and options of the method.
Setting = tuple[float, Mapping[str, Any]]


@dataclass(frozen=True)
class Method:
    """A way to agree, with the settings of its grid besides the learning rate; all grids are as large."""

    name: str
    sync: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sharding: Sharding = "zero-0"
    grid: Sequence[Mapping[str, Any]] = ({},)
    optimizer: str = "adamw"

    def settings(self) -> list[Setting]:
        """Four of each method."""
        if self.optimizer == "lans":
            return list(product(LANS_RATES, self.grid))
        return list(product(RATES if len(self.grid) == 1 else OUTER_RATES, self.grid))


def few(name: str, **options: Any) -> Method:
    return Method(name, "sdp4bit", options, "zero-1")


def outer(name: str, *grid: Mapping[str, Any], **options: Any) -> Method:
    return Method(name, name, {"every": TAU, **options}, grid=grid or ({},))


METHODS = (
    Method("dense", "dense", sharding="zero-1"),
    few("sdp4bit"),
    few("sdp4bit, direct weights", weights="direct"),
    Method("no communication", "local-averaging", {"every": 4096}),
    outer("local-averaging"),
    outer(
        "sign-momentum",
        {"outer_learning_rate": 1.5},
        {"outer_learning_rate": 3.0},
        beta1=0.8,
        beta2=0.95,
        weight_decay=0.0,
    ),
    outer("slow-momentum", {"outer_momentum": 0.2}, {"outer_momentum": 0.5}),
    outer("diloco", {"outer_learning_rate": 0.5}, {"outer_learning_rate": 0.7}),
    few("sdp4bit, gradients not smoothed", smooth=False),
    few("sdp4bit, weights only", gradients="whole"),
    Method("power-sgd", "power-sgd", grid=({"rank": 2}, {"rank": 4})),
)
CONTROL = "no communication"


def clan(name: str, codec: str, **options: Any) -> Method:
    # All matrices of the small model are encoded.
    options = {"codec": codec, "minimum_bytes": 4096, **options}
    return Method(name, "clan", options, optimizer="lans")


CLAN_METHODS = (
    Method("dense", "dense", optimizer="lans"),
    clan("clan, 7 bits", "linear-dithering", bits=7),
    clan("clan, signs", "scaled-sign"),
    clan("clan, 1 of 1000", "top-k", ratio=1000.0),
    Method(CONTROL, "local-averaging", {"every": 4096}, optimizer="lans"),
)
GATES = {"sdp4bit": GATE, "clan, 7 bits": CLAN_GATE}


def text_bytes() -> torch.Tensor:
    """The sources of the standard library without installed packages, shape (bytes,)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batches(
    data: torch.Tensor, plan: Plan, *key: int | str
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of random windows, keyed by what they are for and by their sample."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = plan.micro_batch_size
        starts = [
            counter_seed(0, *key, sample) % (len(data) - MODEL.sequence - 1)
            for sample in range(number * size, (number + 1) * size)
        ]
        tokens = torch.stack([data[start : start + MODEL.sequence + 1] for start in starts]).long()
        return tokens[:, :-1], tokens[:, 1:]

    return micro_batch


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def replicated_plan(
    graph: LayerGraph,
    cluster: Cluster,
    sync: Choice,
    sharding: Sharding,
    precision: str = "fp32",
    reduce_precision: str | None = None,
    optimizer: str = "adamw",
) -> Plan:
    """The plan of replicas with one micro-batch each."""
    layout = Layout(
        pp=1,
        dp=RANKS,
        tp=1,
        loops=1,
        micro_batch_size=GLOBAL_BATCH // RANKS,
        schedule="gpipe",
        sharding=sharding,
        sync=sync.name,
    )
    job = Job(
        graph=graph,
        cluster=cluster,
        global_batch=GLOBAL_BATCH,
        sequence=MODEL.sequence,
        precision=precision,
        reduce_precision=reduce_precision,
        optimizer=KNOWN_OPTIMIZERS[optimizer],
        sync_options=sync.options,
    )
    return build_plan(job, layout, flops_per_layer(job))


def plan_of(method: Method, more: Mapping[str, Any]) -> Plan:
    cluster = parse_cluster("+".join(["1xa100-80gb"] * RANKS))
    sync = Choice(name=method.sync, options={**method.options, **more})
    return replicated_plan(layer_graph(MODEL), cluster, sync, method.sharding, optimizer=method.optimizer)


def train(
    rank: int, method: Method, setting: Setting, seed: int, steps: int, generation: int
) -> tuple[dict[int, float], float]:
    """Return the held-out losses after steps, the last one among them, and the seconds of the run."""
    rate, more = setting
    began, plan, data = time.perf_counter(), plan_of(method, more), text_bytes()
    split = int(0.95 * len(data))
    settings = OptimizerSettings(
        name=method.optimizer,
        learning_rate=rate,
        weight_decay=0.1,
        warm_up_steps=steps // 20,
        schedule="cosine",
        final_learning_rate=rate / 10,
        decay_steps=steps,
    )
    runtime = RankRuntime(
        plan,
        compile_part(plan, layer_graph(MODEL), rank),
        build_stages(plan, MODEL, rank, seed, torch.float32),
        loss_of,
        optimizer_factory(settings),
        device="cpu",
        seed=seed,
        generation=generation,
    )
    part = compile_evaluation_part(plan, layer_graph(MODEL), rank)
    held_out = [batches(data[split:], plan, "held out", index) for index in range(HELD_OUT_BATCHES)]
    losses: dict[int, float] = {}
    for step in range(steps):
        set_learning_rate(runtime.optimizers.values(), settings.rate(step))
        runtime.step(step, batches(data[:split], plan, "train", seed, step))
        if step + 1 == steps or step + 1 in MARKS:
            runtime.gather_weights()
            losses[step + 1] = runtime.evaluate(part, held_out)
    runtime.close()
    return losses, time.perf_counter() - began


def worker(report: Report, asked: argparse.Namespace) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    steps, seeds = (30, SEEDS[:2]) if asked.quick else (asked.steps, SEEDS)
    methods = CLAN_METHODS if asked.optimizer == "lans" else METHODS
    about = [f"{steps} steps"] if steps != STEPS else []
    about += [asked.optimizer] if asked.optimizer != "adamw" else []
    generations = count()

    def loss(method: Method, setting: Setting, seed: int) -> float:
        rate, more = setting
        words = [method.name, f"rate {rate:.2g}", *(f"{key} {value}" for key, value in more.items())]
        cell = ", ".join([*words, *about, f"seed {seed}"])
        known = report.values(cell)
        if "loss" in known:
            return known["loss"]
        found, seconds = train(context.rank, method, setting, seed, steps, next(generations))
        if context.rank == 0:
            before = {f"loss at {step}": Value(found[step], "nats") for step in found if step != steps}
            values = {**before, "loss": Value(found[steps], "nats"), "run": Value(seconds, "s")}
            report.add_cell(cell, values)
        return found[steps]

    losses = {}
    for method in methods:
        settings = method.settings()[:1] if asked.quick else method.settings()
        tuned = min(settings, key=lambda setting: sum(loss(method, setting, seed) for seed in TUNING_SEEDS))
        losses[method.name] = [loss(method, tuned, seed) for seed in seeds]
    if context.rank == 0:
        for name, found in losses.items():
            report.add_cell(", ".join([name, *about]), beside_dense(name, found, losses["dense"]))
        for name in ("local-averaging", "slow-momentum", "diloco") if "sign-momentum" in losses else ():
            report.add(f"sign-momentum - {name}", difference(losses["sign-momentum"], losses[name]))
    context.close()


def difference(found: Sequence[float], other: Sequence[float]) -> Value:
    """The mean paired difference in nats with its 95 % interval."""
    differences = [mine - its for mine, its in zip(found, other, strict=True)]
    mean = statistics.mean(differences)
    half = T_95 * statistics.stdev(differences) / len(differences) ** 0.5
    return Value(mean, "nats", low=mean - half, high=mean + half)


def beside_dense(name: str, found: Sequence[float], dense: Sequence[float]) -> dict[str, Value]:
    """The mean loss and the difference to dense; the gate is the upper end, for the control ten times it."""
    more = difference(found, dense)
    low, high = more.low, more.high
    assert low is not None
    assert high is not None
    if name in GATES:
        more = replace(more, target=GATES[name], met=high <= GATES[name])
    elif name == CONTROL:
        more = replace(more, target=10 * GATE, met=low > 10 * GATE)
    return {"held-out loss": Value(statistics.mean(found), "nats"), "more than dense": more}


def options() -> argparse.ArgumentParser:
    made = parser_of_trainings(__doc__, STEPS)
    made.add_argument("--optimizer", choices=("adamw", "lans"), default="adamw")
    return made


def main() -> int:
    asked = options().parse_args()
    return run_trainings(__file__, RANKS, asked, worker, "--optimizer", asked.optimizer)


if __name__ == "__main__":
    sys.exit(main())
