"""Ways to make the gradient of a step from those of its micro-batches: clipping, and what it competes with.

Tensors have a first axis of runs: trainings beside each other that share nothing. `means` are the gradients
of micro-batches, (runs, micro-batches, n). A rule may keep a state. So every training makes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from weft.methods.micro_batch_clipping.options import ClipTable
from weft.methods.micro_batch_clipping.runtime.clipped_sum import ClippedSum

# A gradient of at most this norm has no direction; `[clip] floor` is the same.
FLOOR = 1e-12
PERCENTILE = 0.1
PRUNED = 0.1


class StepRule:
    """The plain mean of all micro-batches; other rules are made from it."""

    def weights(self, losses: torch.Tensor) -> torch.Tensor:
        """The weight of each sample in the mean of its micro-batch, from their losses, (runs, samples)."""
        return torch.ones_like(losses)

    def combine(self, means: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """The gradient of the step, (runs, n); `sources` of micro-batches are (runs, micro-batches)."""
        return means.mean(1)


class LeastNorm(StepRule):
    """Micro-batch clipping: each micro-batch gets the least norm of the step (Wang, arXiv 2408.16204).

    With more than one source, each micro-batch gets the least norm of its source.
    """

    def __init__(self, sources: int = 1) -> None:
        self._sources = sources

    def combine(self, means: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        if means.shape[1] == 1:
            return means[:, 0]
        norms = means.norm(dim=2)
        counted = torch.where(norms > FLOOR, norms, torch.inf)
        bounds = torch.zeros_like(norms)
        for source in range(self._sources):
            own = sources == source if self._sources > 1 else torch.ones_like(sources, dtype=torch.bool)
            least = torch.where(own, counted, torch.inf).amin(1, keepdim=True)
            bounds = torch.where(own & least.isfinite(), least, bounds)
        factors = bounds / counted / means.shape[1]
        return torch.bmm(factors.unsqueeze(1), means).squeeze(1)


class CoordinateMedian(StepRule):
    """The median of micro-batches in each coordinate; with an even number, the mean of the middle two."""

    def combine(self, means: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        count = means.shape[1]
        ordered: torch.Tensor = means.sort(dim=1).values
        return ordered[:, [(count - 1) // 2, count // 2]].mean(1)


class AutoClip(StepRule):
    """The mean, clipped at a percentile of all norms so far, this step's among them (arXiv 2007.14469).

    Attributes:
        bound: of the last step, (runs,).
    """

    def __init__(self, percentile: float = PERCENTILE) -> None:
        self._percentile = percentile
        self._history: list[torch.Tensor] = []
        self.bound = torch.empty(0)

    def combine(self, means: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        mean = means.mean(1)
        norms = mean.norm(dim=1)
        self._see(norms)
        factor: torch.Tensor = self.bound / norms.clamp(min=FLOOR)
        return mean * factor.clamp(max=1.0).unsqueeze(1)

    def _see(self, norms: torch.Tensor) -> None:
        self._history.append(norms)
        self.bound = torch.stack(self._history).quantile(self._percentile, dim=0)


class FixedClip(AutoClip):
    """The mean, clipped at a bound that is fixed after some steps: a percentile of the norms of those."""

    def __init__(self, steps: int, percentile: float = PERCENTILE) -> None:
        super().__init__(percentile)
        self._steps = steps

    def _see(self, norms: torch.Tensor) -> None:
        if len(self._history) < self._steps:
            super()._see(norms)


class LossPruning(StepRule):
    """The mean without the samples of the highest loss; the others take over their weight."""

    def __init__(self, share: float = PRUNED) -> None:
        self._share = share

    def weights(self, losses: torch.Tensor) -> torch.Tensor:
        count = losses.shape[1]
        dropped = round(self._share * count)
        kept = torch.full_like(losses, count / (count - dropped))
        return kept.scatter(1, losses.topk(dropped, dim=1).indices, 0.0)


class Arm(NamedTuple):
    """A rule, and the samples of the micro-batches that it sees; all of the batch if it needs their mean."""

    name: str
    samples: int
    make: Callable[[], StepRule]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.samples}" if self.name in GROUPED else self.name


PLAIN, MIN, MEDIAN = "plain mean", "min", "median"
GROUPED = MIN, MEDIAN


def arms(batch: int, sizes: tuple[int, ...], medians: tuple[int, ...], first_steps: int) -> list[Arm]:
    return [
        Arm(PLAIN, batch, StepRule),
        *(Arm(MIN, size, LeastNorm) for size in sizes),
        Arm("fixed norm", batch, lambda: FixedClip(first_steps)),
        Arm("AutoClip", batch, AutoClip),
        *(Arm(MEDIAN, size, CoordinateMedian) for size in medians),
        Arm("loss pruning", batch, LossPruning),
    ]


def require_as_weft(seed: int = 0) -> None:
    """Check that the rule of this file is the one that weft's training runs, also with several sources."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(1, 8, 5, generator=generator, dtype=torch.float64)
    for sources in (1, 3):
        of = torch.randint(sources, (1, 8), generator=generator)
        total, result = (
            ClippedSum(ClipTable(samples=1, sources=sources), 8, [means[0, 0]]),
            means[0, 0].clone(),
        )
        norms = [
            total.add([one / 8], (one / 8).square().sum(), source=source)
            for one, source in zip(means[0], of[0].tolist(), strict=True)
        ]
        total.finish(torch.stack(norms), of[0], [result])
        torch.testing.assert_close(result, LeastNorm(sources).combine(means, of)[0])
