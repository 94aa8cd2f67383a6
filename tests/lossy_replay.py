"""One process that steps all replicas of a small run of `lossy_runs` in turn, with those that are present."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from weft.describe.synchronisation import sync_options
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.options import CserOptions
from weft.methods.cser.runtime.compressors import BlockCompressor
from weft.run.stage.build import build_stages
from weft.training.data.sampler import SampleLedger
from weft.training.optimizer.optimizers import optimizer_factory, set_learning_rate, settings_of
from weft.training.session import reopen
from weft.training.tasks.base import Meter, TaskSettings
from weft.training.tasks.text import CausalLanguageModelling


class Replica:
    """A model, its optimizer and its error, shape (n,)."""

    def __init__(self, directory: Path) -> None:
        job = reopen(directory, of_all=True)
        self.model = build_stages(job.plan, job.problem.model, 0, job.run.train.seed, torch.float64)[0]
        self.names = [name for name, _ in self.model.named_parameters()]
        self.optimizer = optimizer_factory(settings_of(job.run))(self.model)
        self.error = torch.zeros_like(self.weights)
        self.moved = torch.zeros_like(self.weights)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])

    @weights.setter
    def weights(self, values: torch.Tensor) -> None:
        nn.utils.vector_to_parameters(values, self.model.parameters())


def replayed(
    directory: Path, absent: Mapping[range, Collection[int]], *, steps: int, samples: int = 2
) -> list[Replica]:
    """The replicas after some steps; `absent` are the replicas that are new behind a range of steps."""
    job = reopen(directory, of_all=True)
    options, seed = sync_options("cser", job.plan.sync.options), job.run.train.seed
    assert isinstance(options, CserOptions)
    settings = TaskSettings(
        data=job.run.task.data,
        sequence=job.plan.sequence,
        vocabulary=job.problem.model.vocabulary,
        cache=directory.parent / "cache",
        seed=seed,
    )
    task = CausalLanguageModelling(settings)
    loss_of, ledger, rate = Meter(task), SampleLedger(task.samples, seed), settings_of(job.run).rate
    replicas = [Replica(directory) for _ in job.plan.stages[0].replicas]
    ratios, taken = options.ratios, 0

    def meet(place: str, number: int, there: list[Replica]) -> None:
        """Move a part of what `place` names towards its mean."""
        ratio = ratios.update if place == "update" else ratios.reset
        assert ratio is not None
        blocks = Blocks.of(len(there[0].error), ratios.largest, options.block)
        drawn = BlockCompressor(blocks, ratio, False, seed, place, there[0].names[0])
        places = drawn.chosen(number).places
        own = [(one.moved if place == "update" else one.error)[places].clone() for one in there]
        mean, sign = sum(own) / len(own), 1.0 if place == "update" else -1.0
        for one, mine in zip(there, own, strict=True):
            weights = one.weights
            weights[places] += sign * (mine - mean)
            one.weights = weights
            one.error[places] += sign * mine

    for step in range(steps):
        away = {replica for range_, some in absent.items() if step in range_ for replica in some}
        there = [one for replica, one in enumerate(replicas) if replica not in away]
        for came in {replica for range_, some in absent.items() if step == range_.stop for replica in some}:
            replicas[came].__init__(directory)  # type: ignore[misc]
            others = [one for one in there if one is not replicas[came]]
            replicas[came].weights = sum(one.weights - one.error for one in others) / len(others)
        for one in there:
            before = one.weights
            set_learning_rate([one.optimizer], rate(step))
            one.optimizer.zero_grad()
            inputs, targets = task.batch(ledger.take(taken, samples))
            loss_of(one.model(inputs), targets).backward()
            one.optimizer.step()
            taken += samples
            one.moved = before - one.weights
            one.error -= one.moved
        meet("update", step, there)
        if (step + 1) % ratios.every == 0:
            meet("reset", step // ratios.every, there)
    return replicas
