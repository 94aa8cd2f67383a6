"""Losses and metrics over held-out samples, which show a run's progress."""

from __future__ import annotations

import numpy as np
import torch

from weft.program.arrays import Ints
from weft.run.workspace import Batch
from weft.training.open_run import OpenRun
from weft.training.tasks.base import Task

# The number of samples for the held-out loss, rounded up to whole global batches; always the same samples.
HELD_OUT_SAMPLES = 256


def held_out_samples(run: OpenRun) -> Ints:
    """Return the fixed samples for a run's held-out loss, in whole global batches.

    They are spread evenly over the held-out data; if it has too few, some count more than once.
    """
    size = run.job.plan.global_batch
    return spread_evenly(run.task.held_out_samples, -(-HELD_OUT_SAMPLES // size) * size)


def spread_evenly(available: int, count: int) -> Ints:
    """Return `count` rising sample numbers below `available`, shape (count,)."""
    return np.arange(count, dtype=np.int64) * available // count


def held_out(run: OpenRun, samples: Ints) -> tuple[float, dict[str, float]]:
    """Return the mean loss over held-out samples, in nats per target, and the task's metrics over them.

    Every rank calls it with the same whole global batches of samples.
    """
    plan, task = run.job.plan, run.task
    batches = [
        _held_out_batch(task, part, plan.micro_batch_size) for part in samples.reshape(-1, plan.global_batch)
    ]
    with run.meter.open():
        loss = run.runtime.evaluate(run.evaluation, batches)
    return loss, run.meter.collect()


def _held_out_batch(task: Task, samples: Ints, micro_batch_size: int) -> Batch:
    """Return a function from micro-batch numbers to tensors: g has samples g * size to (g + 1) * size."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = number * micro_batch_size
        return task.batch(samples[first : first + micro_batch_size], held_out=True)

    return micro_batch
