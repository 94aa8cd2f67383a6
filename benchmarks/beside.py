"""Two trainers of the same work, ours and a peer, in alternating blocks of steps on the same ranks.

Blocks alternate so that both meet the same moods of the machine; the ratio of their medians comes with a
bootstrap interval over the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from figures import Value

BLOCKS, STEPS, WARM_UP_BLOCKS = 24, 10, 2
# What one trainer trains in all: a first step, whose losses are compared, then the blocks.
ALL_STEPS = (BLOCKS + WARM_UP_BLOCKS) * STEPS + 1
WORK = f"{BLOCKS * STEPS} steps of each in {BLOCKS} alternating blocks"
RESAMPLES = 10_000
SEED = 5

Floats = npt.NDArray[np.float64]

# Trains some steps and returns the last one's loss where the rank knows it.
Trainer = Callable[[int], float | None]


def side_by_side(ours: Trainer, theirs: Trainer) -> Floats:
    """Seconds of a step of (ours, theirs) in every block after the warm-up, shape (blocks, 2).

    All ranks call it. Exits when the two do not compute the same.
    """
    own, other = ours(1), theirs(1)
    if own is not None and other is not None and not np.isclose(own, other, rtol=1e-5):
        raise SystemExit(f"the two do not compute the same: loss {own} and {other}")
    times = np.array([[_block_s(ours), _block_s(theirs)] for _ in range(BLOCKS + WARM_UP_BLOCKS)])
    return times[WARM_UP_BLOCKS:] / STEPS


def _block_s(train: Trainer) -> float:
    """One block, from the moment all ranks begin to the moment all have ended."""
    dist.barrier()
    began = time.perf_counter()
    train(STEPS)
    dist.barrier()
    return time.perf_counter() - began


def ratio_of(times: Floats, *, target: float) -> dict[str, Value]:
    """Median step of both, and the ratio of the medians with its bootstrap 95 % interval over blocks.

    The target is for the interval's upper end.
    """
    ours_s, theirs_s = np.median(times, axis=0).tolist()
    draws = np.random.default_rng(SEED).integers(len(times), size=(RESAMPLES, len(times)))
    medians = np.median(times[draws], axis=1)
    low, high = np.percentile(medians[:, 0] / medians[:, 1], [2.5, 97.5]).tolist()
    return {
        "weft": Value(ours_s, "s"),
        "torch": Value(theirs_s, "s"),
        "ratio": Value(ours_s / theirs_s, "ratio", target, met=high <= target, low=low, high=high),
    }
