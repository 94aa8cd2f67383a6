"""Trainings of one plan or another by weft's runtime, in processes that train one after the other.

`Ranks` starts processes once. They train with a rank of a plan each, over gloo, and with the plan's windows.
So the statistics are as old as those of `weft train` with the same plan.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan
from weft.describe.run_file import load_run
from weft.errors import RunError
from weft.planning.compile import compile_part
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.workspace import Samples
from weft.training.optimizer.optimizers import (
    BETAS,
    BETAS_OF,
    MOMENTUM,
    MUON_MOMENTUM,
    OptimizerSettings,
    optimizer_factory,
    set_learning_rate,
)
from weft.training.tasks import make_task
from weft.training.tasks.base import Task, TaskSettings

AGE = "curvature_age_steps"
NO_LOSS = float("inf")


class Job(NamedTuple):
    """A model, as `[model]` names it, and its task, as `[task]` does; the folder keeps prepared data."""

    model: str
    task: str
    folder: str
    data: str = ""


@dataclass(frozen=True)
class Arm:
    """An optimizer, and K-FAC in front of it with this damping, if any.

    Attributes:
        warm_up: steps until the full learning rate.
        decay: that of weights.
    """

    optimizer: str
    rate: float
    damping: float | None = None
    warm_up: int = 10
    decay: float = 0.0

    @property
    def name(self) -> str:
        return self.optimizer if self.damping is None else f"K-FAC + {self.optimizer}"

    def settings(self, steps: int) -> OptimizerSettings:
        return OptimizerSettings(
            name=self.optimizer,
            learning_rate=self.rate,
            weight_decay=self.decay,
            warm_up_steps=self.warm_up,
            schedule="linear",
            decay_steps=steps,
            betas=BETAS_OF.get(self.optimizer, BETAS),
            momentum=MUON_MOMENTUM if self.optimizer == "muon" else MOMENTUM,
        )


@dataclass(frozen=True)
class Training:
    """One training of an arm; its plan's K-FAC, if any, gets the arm's damping."""

    arm: Arm
    plan: Plan
    steps: int
    seed: int

    @property
    def damped(self) -> Plan:
        """The plan of the arm."""
        if self.arm.damping is None:
            return self.plan
        methods = tuple(
            Choice(name=one.name, options={**one.options, "damping": self.arm.damping})
            if one.name == "kfac"
            else one
            for one in self.plan.methods
        )
        return self.plan.model_copy(update={"methods": methods})


class Curve(NamedTuple):
    """The losses of a training's steps, and the ages of its curvature; infinite from a step that fails."""

    losses: list[float]
    ages: list[float]


def planned(tables: dict[str, dict[str, Any]]) -> PlannedJob:
    """Plan a run file of these tables."""
    lines = [
        f"[{name}]\n" + "\n".join(f"{key} = {_toml(value)}" for key, value in table.items())
        for name, table in tables.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text("\n\n".join(lines) + "\n")
        return plan_run(load_run(path))


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


class Ranks:
    """Processes that train together, each with a rank of a plan; one process alone takes plans of one rank.

    Use it as a context.
    """

    def __init__(self, job: Job, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(job, rank, ranks, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if failure is None:
                pipe.send(None)
            else:
                process.terminate()
            process.join()
        self._folder.cleanup()

    def train(self, trainings: Iterable[Training]) -> list[Curve]:
        """Train one after the other; return what the first rank saw."""
        found = []
        for one in trainings:
            for pipe in self._pipes:
                pipe.send(one)
            found.append([pipe.recv() for pipe in self._pipes])
        return [curves[0] for curves in found]


def train_beside(all_ranks: Sequence[Ranks], trainings: Sequence[Training]) -> list[Curve]:
    """Train in several sets of processes at once."""
    shares = [trainings[start :: len(all_ranks)] for start in range(len(all_ranks))]
    found: list[Curve] = [Curve([], [])] * len(trainings)
    with ThreadPoolExecutor(len(all_ranks)) as pool:
        for start, curves in enumerate(pool.map(lambda ranks, share: ranks.train(share), all_ranks, shares)):
            found[start :: len(all_ranks)] = curves
    return found


def _serve(job: Job, rank: int, ranks: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    config = resolve_model(job.model)
    settings = TaskSettings(
        data=job.data, sequence=config.sequence, vocabulary=config.vocabulary, cache=Path(job.folder)
    )
    task = make_task(job.task, settings)
    for generation in count():
        training = pipe.recv()
        if training is None:
            return
        pipe.send(_trained(config, task, training, rank, generation))


def _trained(config: ModelConfig, task: Task, training: Training, rank: int, generation: int) -> Curve:
    plan, settings = training.damped, training.arm.settings(training.steps)
    runtime = RankRuntime(
        plan,
        compile_part(plan, layer_graph(config), rank),
        build_stages(plan, config, rank, training.seed, torch.float32),
        task.loss,
        optimizer_factory(settings),
        device="cpu",
        seed=training.seed,
        generation=generation,
    )
    losses, ages, size = [], [], plan.micro_batch_size
    rng = np.random.default_rng(training.seed)
    order = rng.permutation(task.samples) if plan.global_batch < task.samples else np.arange(task.samples)
    for step in range(training.steps):
        first = step * plan.global_batch

        def batch(number: int, first: int = first) -> Samples:
            chosen = np.arange(first + number * size, first + (number + 1) * size) % len(order)
            return task.batch(order[chosen])

        set_learning_rate(runtime.optimizers.values(), settings.rate(step))
        try:
            result = runtime.step(step, batch)
            losses.append(result.loss)
        except RunError:
            # A factor is not finite, since the training diverged; only a plan of one rank goes on from it.
            break
        ages.append(result.totals.get(AGE, 0.0))
        if not np.isfinite(losses[-1]):
            break
    runtime.close()
    return Curve([*losses, *[NO_LOSS] * (training.steps - len(losses))], ages)
