"""Trainings beside each other: one rule, and a learning rate and a seed for each.

The learning rate falls to 0 in a straight line.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from arms import StepRule
from bad_tasks import BadTask

MOMENTUM, SQUARES, EPSILON = 0.9, 0.99, 1e-8


class Start(NamedTuple):
    """What tells one training from those beside it."""

    rate: float
    seed: int
    bad: float


class Seen(NamedTuple):
    """The samples of all steps (runs, steps, batch) with their losses, and the micro-batches' norms.

    `norms` are (runs, steps, micro-batches), and `bad` tells of each sample whether it is, (runs, samples).
    """

    chosen: torch.Tensor
    losses: torch.Tensor
    norms: torch.Tensor
    bad: torch.Tensor


def order(sources: torch.Tensor, block: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """The samples of the first `count` places of a training, epoch by epoch; blocks are of one source."""
    epochs: list[torch.Tensor] = []
    while sum(map(len, epochs)) < count:
        blocks = []
        for source in sources.unique():
            own = torch.nonzero(sources == source).squeeze(1)
            own = own[torch.randperm(len(own), generator=generator)]
            blocks.append(own[: len(own) // block * block].view(-1, block))
        together = torch.cat(blocks)
        epochs.append(together[torch.randperm(len(together), generator=generator)].flatten())
    return torch.cat(epochs)[:count]


class StackedTraining:
    """Trainings of a task beside each other; afterwards, `weights` are those of the models, (runs, n).

    Args:
        samples: those of a micro-batch.
        block: samples after each other that are of one source.
    """

    def __init__(self, task: BadTask, starts: list[Start], samples: int, block: int = 1) -> None:
        self._task, self._samples, self._block = task, samples, block
        self._generators = [torch.Generator().manual_seed(start.seed) for start in starts]
        self._data = [
            task.samples(start.bad, own) for start, own in zip(starts, self._generators, strict=True)
        ]
        self._rates = torch.tensor([start.rate for start in starts]).unsqueeze(1)
        self.weights = torch.stack([task.start(own) for own in self._generators])
        self._mean, self._squares = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

    def run(self, rule: StepRule, steps: int) -> Seen:
        runs, batch = len(self._data), self._task.batch
        pairs = zip(self._data, self._generators, strict=True)
        chosen = torch.stack([order(data.sources, self._block, steps * batch, own) for data, own in pairs])
        chosen = chosen.view(runs, steps, batch)
        inputs = torch.stack([data.inputs for data in self._data])
        targets = torch.stack([data.targets for data in self._data])
        sources = torch.stack([data.sources for data in self._data])
        every, losses, norms = torch.arange(runs).unsqueeze(1), [], []
        for step in range(steps):
            now = every, chosen[:, step]
            means, found = self._gradients(rule, inputs[now], targets[now])
            first_of_each = sources[now].view(runs, -1, self._samples)[:, :, 0]
            self._take_step(rule.combine(means, first_of_each), step, steps)
            losses.append(found)
            norms.append(means.norm(dim=2))
        bad = torch.stack([data.bad for data in self._data])
        return Seen(chosen, torch.stack(losses, 1), torch.stack(norms, 1), bad)

    def _gradients(
        self, rule: StepRule, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The micro-batches' gradients (runs, micro-batches, n), and the samples' losses (runs, batch)."""
        runs, batch = inputs.shape[:2]
        groups = batch // self._samples
        models = runs * groups
        copies = [part.requires_grad_() for part in self._task.split(self._copies(groups))]
        losses = self._task.losses(
            copies,
            inputs.reshape(models, self._samples, *inputs.shape[2:]),
            targets.reshape(models, self._samples, *targets.shape[2:]),
        ).view(runs, batch)
        weights = rule.weights(losses.detach())
        parts = torch.autograd.grad((losses * weights).sum() / self._samples, copies)
        flat = torch.cat([part.reshape(models, -1) for part in parts], dim=1)
        return flat.view(runs, groups, -1), losses.detach()

    def _copies(self, groups: int) -> torch.Tensor:
        """A model for each micro-batch: a backward pass then keeps their gradients apart, (models, n)."""
        return self.weights.repeat_interleave(groups, dim=0)

    def _take_step(self, gradient: torch.Tensor, step: int, steps: int) -> None:
        rates = self._rates * (1.0 - step / steps)
        if not self._task.adaptive:
            self.weights -= rates * gradient
            return
        self._mean.lerp_(gradient, 1.0 - MOMENTUM)
        self._squares.lerp_(gradient.square(), 1.0 - SQUARES)
        mean = self._mean / (1.0 - MOMENTUM ** (step + 1))
        squares = self._squares / (1.0 - SQUARES ** (step + 1))
        self.weights -= rates * mean / (squares.sqrt() + EPSILON)

    def held_out(self, part: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return self._task.held_out(self._task.split(self.weights), part)
