"""`BatchReader`: a rank's micro-batches of the next step, read and collated while it trains the present one.

Only what the rank's stages ask for is read, in a thread of the rank: inputs by the first one, targets by the
last one and by those that have a loss of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch

from weft.errors import RunError
from weft.program.kinds import FORWARD
from weft.program.rank_program import RankProgram
from weft.run.workspace import Batch
from weft.training.data.sampler import Ints, SampleLedger
from weft.training.tasks.base import Task

Pair = tuple[torch.Tensor, torch.Tensor]
# (step, global micro-batch number) to inputs and targets.
Read = Callable[[int, int], Pair]


class BatchReader:
    """Reads one step ahead of the step that is under way; a context that ends its thread.

    Args:
        read: what is read; called in the thread, in the order of the steps.
        numbers: global micro-batch numbers of a step, in the order in which they are needed.
        steps: the steps that will be asked for, in turn.
    """

    def __init__(self, read: Read, numbers: Sequence[int], steps: range) -> None:
        self._read = read
        self._numbers = tuple(numbers)
        self._steps = steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weft-reader")
        self._waited_s = 0.0
        self._next = self._ask(steps.start)

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def step(self, step: int) -> Batch:
        """Micro-batches of the next step; begins to read those of the step after it.

        What it gives waits for a micro-batch that is not read yet, and raises what its reading raised.
        """
        under_way, self._next = self._next, self._ask(step + 1)
        self._waited_s = 0.0

        def micro_batch(number: int) -> Pair:
            started_s = time.monotonic()
            pair = under_way[number].result()
            self._waited_s += time.monotonic() - started_s
            return pair

        return micro_batch

    @property
    def waited_s(self) -> float:
        """How long the step under way has waited for data."""
        return self._waited_s

    def _ask(self, step: int) -> dict[int, Future[Pair]]:
        if step not in self._steps:
            return {}
        return {number: self._pool.submit(self._read, step, number) for number in self._numbers}


def micro_batches_read(program: RankProgram, target_stages: Collection[int] = ()) -> list[int]:
    """Global micro-batch numbers whose inputs or targets the rank needs, in the order of its instructions.

    `target_stages` are stages that need targets, beside the last one.
    """
    owed, columns = program.obligations, program.columns
    last = {stage for stage in program.stages if stage not in dict(owed.stage_edges)}
    reading = {*owed.sources, *last, *target_stages}
    forward = columns.kind == FORWARD
    stages, numbers = columns.stage[forward].tolist(), columns.micro_batch[forward].tolist()
    needed = (
        number // owed.split(stage) for stage, number in zip(stages, numbers, strict=True) if stage in reading
    )
    return list(dict.fromkeys(needed))


def training_samples(task: Task, ledger: SampleLedger, first: int, global_batch: int, size: int) -> Read:
    """Reads micro-batch g of step s: samples g * size to (g + 1) * size of the step's global batch.

    Args:
        first: position in the ledger from which steps count (`TrainingState.origin`).
    """

    def read(step: int, number: int) -> Pair:
        samples = ledger.take(first + step * global_batch + number * size, size)
        try:
            return task.batch(samples)
        except Exception as error:
            raise RunError(f"step {step}: {_named(task, samples, error)}") from error

    return read


def _named(task: Task, samples: Ints, error: Exception) -> str:
    """Return the first sample that cannot be read by itself, by the task's name for it, and why."""
    name = getattr(task, "sample_name", lambda sample: "")
    for sample in samples.tolist():
        try:
            task.batch(np.array([sample]))
        except Exception as alone:
            return f"{' '.join(f'sample {sample} {name(sample)}'.split())}: {_reason(alone)}"
    return f"samples {', '.join(map(str, samples.tolist()))}: {_reason(error)}"


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
