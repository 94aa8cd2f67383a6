"""Images at high ratios: CSER and error feedback beside dense training, and replicas that never speak.

Four ranks train a small VGG on rendered characters: 20,000 for training and 10,000 for tests. All methods see
the same samples for one seed, dealt out evenly or sorted by label. Each method has the same grid of learning
rates, searched with another seed than those of the comparison. Replicas alone are the control: the gate is
judged only where they miss dense training by five times as much.

    python benchmarks/images_at_ratios.py            # a few minutes for each run of 20,480 steps
    python benchmarks/images_at_ratios.py --quick    # few steps and images: shows only that it works
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from figures import Value
from harness import Report, parser_of_trainings, run_trainings
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from weft.describe.cluster_file import parse_cluster
from weft.describe.convolutional_models import convolutional_config
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_evaluation_part, compile_part
from weft.randomness import counter_seed
from weft.run.launch.worker_start import start_worker
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage, build_stages
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory, set_learning_rate

RANKS, MICRO_BATCH, SIZE = 4, 16, 16
# Without the letters and digits that look alike.
CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
MODEL = convolutional_config(
    "vgg-characters",
    family="vgg",
    widths=(16, 32),
    depths=(1, 1),
    feed_forward=64,
    pooled_size=2,
    image_size=SIZE,
    channels=1,
    vocabulary=len(CHARACTERS),
    dropout=0.0,
)
# 20 steps for each unit of the largest ratio.
STEPS = 20 * 1024
RATES, TUNING_SEED, SEEDS = (0.02, 0.05, 0.1), 100, (0, 1)
DEALS = ("evenly", "sorted by label")
# The accuracy that ratio 256 may lose to dense training, and how many times as much the control must lose.
GATE, CONTROL_TIMES = 0.005, 5


class Images(NamedTuple):
    """Pixels, shape (images, 1, side, side), and labels, sorted by label."""

    pixels: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Arm:
    """A way for replicas to agree; `sync` empty: each one trains alone."""

    name: str
    sync: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


ALONE = Arm("no communication")
ARMS = (
    Arm("dense", "dense"),
    ALONE,
    *(
        arm
        for ratio in (32.0, 256.0, 1024.0)
        for arm in (
            Arm(f"cser {ratio:g}", "cser", {"ratio": ratio}),
            Arm(f"error feedback {ratio:g}", "cser", {"variant": "error-feedback", "ratio": ratio}),
        )
    ),
)


def rendered(images: int, split: str) -> Images:
    """Characters of random size, place, slant and noise, as many of each."""
    random = np.random.default_rng(counter_seed(0, "characters", split))
    fonts = [ImageFont.load_default(size=size) for size in range(10, 16)]
    labels = np.sort(np.arange(images) % len(CHARACTERS))
    pixels = np.empty((images, 1, SIZE, SIZE), dtype=np.float32)
    for number, label in enumerate(labels.tolist()):
        canvas = Image.new("L", (2 * SIZE, 2 * SIZE))
        font = fonts[random.integers(len(fonts))]
        ImageDraw.Draw(canvas).text((SIZE, SIZE), CHARACTERS[label], fill=255, font=font, anchor="mm")
        turned = canvas.rotate(random.uniform(-25, 25), resample=Image.Resampling.BILINEAR)
        left, top = (SIZE // 2 + int(random.integers(-2, 3)) for _ in range(2))
        pixels[number, 0] = np.asarray(turned.crop((left, top, left + SIZE, top + SIZE))) / 255.0
    pixels += random.normal(0.0, 0.2, pixels.shape).astype(np.float32)
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels))


def batches(images: Images, deal: str, *key: int | str) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches keyed by what they are for; each replica has one, from all images or from its labels."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = len(images.labels) // (RANKS if deal == "sorted by label" else 1)
        first = number * length if deal == "sorted by label" else 0
        samples = range(number * MICRO_BATCH, (number + 1) * MICRO_BATCH)
        places = [first + counter_seed(0, *key, sample) % length for sample in samples]
        return images.pixels[places], images.labels[places]

    return micro_batch


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy in training, and the share of wrong labels in tests."""
    if torch.is_grad_enabled():
        return nn.functional.cross_entropy(logits, targets)
    return (logits.argmax(1) != targets).float().mean()


def plan_of(arm: Arm) -> Plan:
    cluster, graph = parse_cluster("+".join(["1xa100-80gb"] * RANKS)), layer_graph(MODEL)
    layout = Layout(
        pp=1,
        dp=RANKS,
        tp=1,
        loops=1,
        micro_batch_size=MICRO_BATCH,
        schedule="gpipe",
        sharding="zero-0",
        sync=arm.sync,
    )
    job = Job(
        graph=graph,
        cluster=cluster,
        global_batch=RANKS * MICRO_BATCH,
        sequence=MODEL.sequence,
        precision="fp32",
        sync_options=Choice(name=arm.sync, options=arm.options).options,
    )
    return build_plan(job, layout, flops_per_layer(job))


@dataclass(frozen=True)
class Trial:
    """One training: how replicas agree, how data are dealt out, at which rate, with which seed."""

    arm: Arm
    deal: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.arm.name}, {self.deal}, rate {self.rate:g}, seed {self.seed}"

    def settings(self, steps: int) -> OptimizerSettings:
        return OptimizerSettings(
            name="sgd",
            learning_rate=self.rate,
            weight_decay=5e-4,
            warm_up_steps=steps // 20,
            schedule="cosine",
            decay_steps=steps,
        )


def together(rank: int, trial: Trial, train: Images, test: Images, steps: int, generation: int) -> float:
    """The accuracy of the mean of replicas that agree."""
    plan, settings = plan_of(trial.arm), trial.settings(steps)
    runtime = RankRuntime(
        plan,
        compile_part(plan, layer_graph(MODEL), rank),
        build_stages(plan, MODEL, rank, trial.seed, torch.float32),
        loss_of,
        optimizer_factory(settings),
        device="cpu",
        seed=trial.seed,
        generation=generation,
    )
    for step in range(steps):
        set_learning_rate(runtime.optimizers.values(), settings.rate(step))
        runtime.step(step, batches(train, trial.deal, "train", trial.seed, step))
    runtime.gather_weights()
    size = RANKS * MICRO_BATCH

    def tests(first: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        def part(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            places = slice(first + number * MICRO_BATCH, first + (number + 1) * MICRO_BATCH)
            return test.pixels[places], test.labels[places]

        return part

    whole = range(0, len(test.labels) - size + 1, size)
    wrong = runtime.evaluate(
        compile_evaluation_part(plan, layer_graph(MODEL), rank), [tests(first) for first in whole]
    )
    runtime.close()
    return 1.0 - wrong


def alone(rank: int, trial: Trial, train: Images, test: Images, steps: int) -> float:
    """The mean accuracy of replicas that never tell each other anything."""
    model, settings = (
        build_stage(MODEL, range(MODEL.layers + 2), trial.seed, torch.float32),
        trial.settings(steps),
    )
    optimizer = optimizer_factory(settings)(model)
    for step in range(steps):
        set_learning_rate([optimizer], settings.rate(step))
        inputs, targets = batches(train, trial.deal, "train", trial.seed, step)(rank)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        wrong = loss_of(model(test.pixels), test.labels)
    dist.all_reduce(wrong)
    return 1.0 - wrong.item() / RANKS


def worker(report: Report, asked: argparse.Namespace) -> None:
    context = start_worker()
    torch.set_num_threads(1)
    steps, seeds, rates = (20, SEEDS[:1], RATES[:1]) if asked.quick else (asked.steps, SEEDS, RATES)
    images = (640, 320) if asked.quick else (20_000, 10_000)
    train, test = rendered(images[0], "train"), rendered(images[1], "test")
    generations = count()

    def accuracy(trial: Trial) -> float:
        known = report.values(str(trial))
        if "accuracy" in known:
            return known["accuracy"]
        began = time.perf_counter()
        if trial.arm is ALONE:
            found = alone(context.rank, trial, train, test, steps)
        else:
            found = together(context.rank, trial, train, test, steps, next(generations))
        if context.rank == 0:
            seconds = Value(time.perf_counter() - began, "s")
            report.add_cell(str(trial), {"accuracy": Value(found, "share"), "run": seconds})
        return found

    for deal in DEALS:
        found: dict[str, list[float]] = {}
        for arm in ARMS:
            tuned = max(rates, key=lambda rate, arm=arm: accuracy(Trial(arm, deal, rate, TUNING_SEED)))
            found[arm.name] = [accuracy(Trial(arm, deal, tuned, seed)) for seed in seeds]
        if context.rank == 0:
            for name, accuracies in found.items():
                report.add_cell(f"{name}, {deal}", beside_dense(name, accuracies, found))
    context.close()


def beside_dense(
    name: str, accuracies: Sequence[float], found: Mapping[str, Sequence[float]]
) -> dict[str, Value]:
    """The accuracy, and the part of it lost to dense; judged at 256 where the control says enough."""
    dense, control = (statistics.mean(found[one]) for one in ("dense", ALONE.name))
    lost = dense - statistics.mean(accuracies)
    tells = dense - control >= CONTROL_TIMES * GATE
    below = Value(lost, "share")
    if name == "cser 256" and tells:
        below = replace(below, target=GATE, met=lost <= GATE)
    return {"accuracy": Value(statistics.mean(accuracies), "share"), "below dense": below}


def options() -> argparse.ArgumentParser:
    return parser_of_trainings(__doc__, STEPS)


def main() -> int:
    return run_trainings(__file__, RANKS, options().parse_args(), worker)


if __name__ == "__main__":
    sys.exit(main())
