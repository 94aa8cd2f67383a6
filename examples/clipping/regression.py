"""Two regressions with bad samples: the error of a training whose micro-batches are clipped, by their size.

python regression.py [--quick]

Micro-batches get the least norm of their step (Wang, arXiv 2408.16204, algorithm 1). The last size is the
whole batch: nothing is clipped.

- "labels": 10 % of the labels are far off, and the noise of the others is even. Rates are tuned by size.
- "skewed": 5 % of the samples are far off, and the noise of the others is skewed. Steps become shorter with
  time, so that the mean of all gradients comes ever closer. Clipped gradients keep a bias.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from arms import LeastNorm

from weft.methods.micro_batch_clipping.options import ClipTable
from weft.methods.micro_batch_clipping.runtime.clipped_sum import ClippedSum

BATCH = 64
SIZES = (1, 2, 4, 8, 16, 32, 64)
RATES = (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class Problem:
    """A regression on `inputs` numbers; `bad` of the samples have noise of deviation `bad_noise`."""

    name: str
    inputs: int
    bad: float
    bad_noise: float
    skewed: bool
    falling: bool

    def noise(self, seeds: int, generator: torch.Generator) -> torch.Tensor:
        """The noise of a batch's labels, (seeds, samples); its mean is 0."""
        shape = seeds, BATCH
        if self.skewed:
            own = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator) - 1.0
        else:
            own = torch.randn(shape, generator=generator, dtype=torch.float64)
        far = self.bad_noise * torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(torch.rand(shape, generator=generator) < self.bad, far, own)

    def rate(self, first: float, step: int) -> float:
        return first / (1 + step / 200) ** 0.75 if self.falling else first


LABELS = Problem("labels", inputs=50, bad=0.1, bad_noise=30.0, skewed=False, falling=False)
SKEWED = Problem("skewed", inputs=20, bad=0.05, bad_noise=30.0, skewed=True, falling=True)


def clipped(means: torch.Tensor) -> torch.Tensor:
    """The gradients of a step, (seeds, inputs), from the means of its micro-batches, (seeds, n, inputs)."""
    return LeastNorm().combine(means, torch.zeros(means.shape[:2], dtype=torch.long))


def errors(problem: Problem, size: int, rate: float, steps: Sequence[int], seeds: int) -> list[float]:
    """The mean distance to the right weights after some numbers of steps; size in samples."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(seeds, problem.inputs, 1, generator=generator, dtype=torch.float64)
    # A regression has a constant input, whose weight takes up the mean of the noise.
    weights, found = torch.zeros_like(right), []
    for step in range(1, max(steps) + 1):
        inputs = torch.randn(seeds, BATCH, problem.inputs, generator=generator, dtype=torch.float64)
        inputs[:, :, 0] = 1.0
        residual = inputs @ (weights - right) - problem.noise(seeds, generator).unsqueeze(2)
        means = (inputs * residual).view(seeds, BATCH // size, size, problem.inputs).mean(2)
        weights = weights - problem.rate(rate, step) * clipped(means).unsqueeze(2)
        if step in steps:
            found.append((weights - right).norm(dim=1).mean().item())
    return found


def best_rate(problem: Problem, size: int, steps: int, seeds: int) -> float:
    return min(RATES, key=lambda rate: errors(problem, size, rate, [steps], seeds)[0])


def require_as_weft(seed: int = 0) -> None:
    """Check that the rule of this file is the one that weft's training runs."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(1, 8, 5, generator=generator, dtype=torch.float64)
    total, result = ClippedSum(ClipTable(samples=1), 8, [means[0, 0]]), torch.empty(5, dtype=torch.float64)
    norms = [total.add([one / 8], (one / 8).square().sum()) for one in means[0]]
    total.finish(torch.stack(norms), torch.zeros(8, dtype=torch.long), [result])
    torch.testing.assert_close(result, clipped(means)[0])


class Row(NamedTuple):
    """The errors of one size of micro-batches, by the number of steps."""

    samples: int
    rate: float
    errors: dict[int, float]


def table(problem: Problem, steps: Sequence[int], seeds: int) -> list[Row]:
    rows = []
    for size in SIZES:
        rate = 0.1 if problem.falling else best_rate(problem, size, max(steps), seeds)
        found = errors(problem, size, rate, steps, seeds)
        rows.append(Row(size, rate, dict(zip(steps, found, strict=True))))
    return rows


def main(quick: bool, as_json: bool) -> None:
    require_as_weft()
    seeds, later = (2, 2000) if quick else (16, 16000)
    tables = {
        LABELS.name: table(LABELS, (100, 500) if quick else (250, 1000), seeds),
        SKEWED.name: table(SKEWED, (1000, later), seeds),
    }
    if as_json:
        print(json.dumps({name: [row._asdict() for row in rows] for name, rows in tables.items()}))
        return
    for name, rows in tables.items():
        print(f"{name}: mean distance to the right weights, {seeds} seeds; batches of {BATCH}")
        for row in rows:
            numbers = "  ".join(f"{error:.3f} after {steps}" for steps, error in row.errors.items())
            print(f"  {row.samples:>3} samples, rate {row.rate:<8}  {numbers}")


if __name__ == "__main__":
    main("--quick" in sys.argv, "--json" in sys.argv)
