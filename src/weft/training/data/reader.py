"""`BatchReader`: the prefetch of a rank's micro-batches for the next step during the current one.

A thread of the rank reads only the micro-batches that its stages need. The first stage needs inputs. The
last stage, and stages with a separate loss, need targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Lock

import numpy as np

from weft.errors import RunError
from weft.program.arrays import Ints
from weft.program.kinds import FORWARD
from weft.program.rank_program import RankProgram
from weft.run.workspace import Batch, Samples
from weft.training.data.sampler import SampleLedger, StepSamples
from weft.training.tasks.base import Task, batch_of

# (step, global micro-batch number) to inputs and targets.
Read = Callable[[int, int], Samples]


class BatchReader:
    """A reader one step ahead of the current step; as a context manager it ends its thread.

    Args:
        read: the function that reads a micro-batch; called in the thread, in the order of the steps.
        numbers: global micro-batch numbers of a step, in the order of their use.
        steps: the steps to read, in order.
        runs: returns whether a micro-batch, by its number, runs in a step; others are not read.
    """

    def __init__(
        self,
        read: Read,
        numbers: Sequence[int],
        steps: range,
        runs: Callable[[int, int], bool] = lambda step, number: True,
    ) -> None:
        self._read = read
        self._numbers = tuple(numbers)
        self._runs = runs
        self._steps = steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weft-reader")
        self._waited_s = 0.0
        self._next = self._ask(steps.start)

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def step(self, step: int) -> Batch:
        """Return the micro-batches of `step` as a function of their number; begin to read the next step.

        The function waits for a micro-batch that is not read yet, and raises the error of its read.
        """
        under_way, self._next = self._next, self._ask(step + 1)
        self._waited_s = 0.0

        def micro_batch(number: int) -> Samples:
            started_s = time.monotonic()
            samples = under_way[number].result()
            self._waited_s += time.monotonic() - started_s
            return samples

        return micro_batch

    @property
    def waited_s(self) -> float:
        """The seconds that the current step has waited for data."""
        return self._waited_s

    def _ask(self, step: int) -> dict[int, Future[Samples]]:
        if step not in self._steps:
            return {}
        return {
            number: self._pool.submit(self._read, step, number)
            for number in self._numbers
            if self._runs(step, number)
        }


def micro_batches_read(program: RankProgram, others: Collection[int] = ()) -> list[int]:
    """Return the global micro-batch numbers that the rank needs, in the order of its instructions.

    `others` are stages that need some of their data, beside the first and the last one.
    """
    owed, columns = program.obligations, program.columns
    last = {stage for stage in program.stages if stage not in dict(owed.stage_edges)}
    reading = {*owed.sources, *last, *others}
    forward = columns.kind == FORWARD
    stages, numbers = columns.stage[forward].tolist(), columns.micro_batch[forward].tolist()
    needed = (
        number // owed.split(stage) for stage, number in zip(stages, numbers, strict=True) if stage in reading
    )
    return list(dict.fromkeys(needed))


def samples_of_steps(ledger: SampleLedger, first: int, samples: StepSamples) -> Callable[[int], Ints]:
    """Return a function from a step to its samples, in the order of the batch. It keeps those of two steps.

    Args:
        first: the ledger position of step 0 (`TrainingState.origin`).
    """
    return lru_cache(maxsize=2)(lambda step: ledger.take(first + samples.before(step), samples.of(step)))


class TaskReads:
    """The reads of a task's samples: one at a time, though several threads ask for them."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = Lock()

    def read(
        self, samples: Ints, among: Callable[[], Ints], where: str, *, held_out: bool = False
    ) -> Samples:
        """Return a micro-batch of the task, as `batch_of`.

        Raises:
            RunError: with `where` and the first sample that cannot be read.
        """
        with self._lock:
            try:
                return batch_of(self._task, samples, among, held_out=held_out)
            except Exception as error:
                raise RunError(f"{where}: {self._named(samples, error, held_out)}") from error

    def _named(self, samples: Ints, error: Exception, held_out: bool) -> str:
        """Return the first sample that cannot be read alone, with the task's name for it, and its error."""
        name = getattr(self._task, "sample_name", lambda sample: "")
        for sample in samples.tolist():
            try:
                self._task.batch(np.array([sample]), held_out=held_out)
            except Exception as alone:
                return f"{' '.join(f'sample {sample} {name(sample)}'.split())}: {_reason(alone)}"
        return f"samples {', '.join(map(str, samples.tolist()))}: {_reason(error)}"


def training_samples(reads: TaskReads, ledger: SampleLedger, first: int, samples: StepSamples) -> Read:
    """Return a function that reads micro-batch g of step s. A failed read raises RunError.

    Args:
        first: as in `samples_of_steps`.
    """
    in_step = samples_of_steps(ledger, first, samples)

    def read(step: int, number: int) -> Samples:
        taken = ledger.take(first + samples.position(step, number), samples.size)
        return reads.read(taken, partial(in_step, step), f"step {step}")

    return read


def held_out_reads(reads: TaskReads, samples: Ints, micro_batch_size: int) -> Read:
    """Return a function that reads micro-batch g of a batch of held-out samples; their mean is over all.

    Args:
        samples: shape (batches, samples of a batch).
    """

    def read(batch: int, number: int) -> Samples:
        first = number * micro_batch_size
        own = samples[batch, first : first + micro_batch_size]
        return reads.read(own, samples.ravel, "held-out data", held_out=True)

    return read


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
