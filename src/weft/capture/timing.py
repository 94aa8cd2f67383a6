"""Repeated timings, and the slowest timing of several processes at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

# In medians. Longer calls were interrupted by other work than the work that runs during training.
OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, and the relative half-width of 90 % of the calls around their median."""

    seconds: float
    spread: float


def summarise(seconds: list[float]) -> Timing:
    """Compute the mean and spread of repeated measurements, each counted as at most `OUTLIER` medians.

    A step is a sum of calls, and means add up but medians do not. Other threads take a core from a few calls
    in a hundred, for much longer than the calls' time.
    """
    low, median, high = np.quantile(seconds, [0.05, 0.5, 0.95])
    mean = np.minimum(seconds, OUTLIER * median).mean()
    return Timing(float(mean), float((high - low) / (2.0 * median)) if median > 0 else 0.0)


def host_seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the host."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def repeat(measure: Callable[[], float], *, budget_s: float, least: int = 5, most: int = 200) -> Timing:
    """Summarise the seconds of `least` to `most` measurements in `budget_s` seconds, after one to warm up."""
    measure()
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < least or (time.perf_counter() - begin < budget_s and len(seconds) < most):
        seconds.append(measure())
    return summarise(seconds)


def slowest(timing: Timing) -> Timing:
    """Return the slowest rank's seconds and the largest spread, on every rank."""
    if dist.get_world_size() == 1:
        return timing
    values = torch.tensor([timing.seconds, timing.spread], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return Timing(float(values[0]), float(values[1]))
