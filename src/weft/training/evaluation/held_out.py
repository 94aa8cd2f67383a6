"""Losses and metrics over held-out samples: a run's progress, and the evaluation of its newest checkpoint.

Samples of several sources are also evaluated source by source, with what methods see in these passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weft.describe.run_tables.training import HELD_OUT_SAMPLES
from weft.describe.tasks import is_language
from weft.errors import InputError, Violation
from weft.files import write_whole
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import BY_SOURCE
from weft.program.arrays import Ints
from weft.progress import CountedWork, ProgressReport, unwatched
from weft.run.launch.worker_start import WorkerContext
from weft.run.workspace import Batch
from weft.training.coordination.agreement import gather
from weft.training.data.reader import Read, held_out_reads
from weft.training.open_run import OpenRun, load, open_run
from weft.training.read_ahead import read_ahead
from weft.training.tasks.base import sources_of_task

EachBatch = Callable[[Iterable[Batch]], Iterable[Batch]]


def held_out_samples(run: OpenRun) -> Ints:
    """Return the fixed samples for a run's held-out loss, as `spread_evenly`."""
    return spread_evenly(run.task.held_out_samples, run.job.plan.global_batch)


def spread_evenly(available: int, batch: int) -> Ints:
    """Return rising numbers of samples below `available` in whole batches, shape (count,).

    They are spread evenly: all samples, or `HELD_OUT_SAMPLES` of more. To fill the last batch, some count
    twice, or more often if there are fewer than a batch.
    """
    count = -(-min(available, HELD_OUT_SAMPLES) // batch) * batch
    return np.arange(count, dtype=np.int64) * available // count


def held_out(run: OpenRun, samples: Ints, each: EachBatch = iter) -> tuple[float, dict[str, float]]:
    """Return the mean loss over held-out samples, in nats per target, and the task's metrics over them.

    Every rank calls it with the same whole global batches of samples. A rank reads a batch ahead, and hands
    what others of its node need to them. `each` yields the batches, and may count them.
    """
    batches, read = _batches(run, samples)
    with read_ahead(run, run.evaluation, read, batches) as (reader, _), run.meter.open():
        loss = run.runtime.evaluate(run.evaluation, each(map(reader.step, batches)))
    return loss, run.meter.collect()


def _batches(run: OpenRun, samples: Ints) -> tuple[range, Read]:
    """Return the numbers of the global batches of held-out samples, and a function that reads of them."""
    parts = samples.reshape(-1, run.job.plan.global_batch)
    return range(len(parts)), held_out_reads(run.reads, parts, run.job.plan.micro_batch_size)


class BesideSteps:
    """Evaluations that a method runs beside training steps, if the run has such a method.

    Every rank makes one before the first step, and calls it between the same steps.
    """

    def __init__(self, run: OpenRun) -> None:
        self._meter = run.meter
        found = (one.evaluation for one in run.runtime.methods.values())
        self._evaluation = next((one for one in found if one is not None), None)
        if self._evaluation is not None:
            batches, read = _batches(run, held_out_samples(run))
            self._evaluation.prepare([partial(read, batch) for batch in batches], self._meter)

    @property
    def under_way(self) -> bool:
        return self._evaluation is not None and self._evaluation.begun is not None

    def begin(self, done: int, left: int) -> bool:
        """Begin to evaluate the weights after `done` steps, with `left` more to come; False: do it now."""
        one = self._evaluation
        if one is None or one.steps > left:
            return False
        self._meter.reset()
        one.start(done)
        return True

    def ended(self, done: int) -> tuple[int, float, dict[str, float]] | None:
        """Return the evaluation that the last of `done` steps has ended: its step, loss and metrics."""
        one = self._evaluation
        if one is None or one.begun is None or done < one.begun + one.steps:
            return None
        step = one.begun
        # The order of all sums is that of an evaluation between steps.
        losses = [sum(each) for each in zip(*gather(one.take_shares()), strict=True)]
        return step, sum(losses) / len(losses), self._meter.collect()


def by_source(run: OpenRun, samples: Mapping[str, Ints], each: EachBatch = iter) -> dict[str, dict[str, Any]]:
    """Return losses and metrics by source, and what methods saw in the passes of its samples.

    Every rank calls it with the same whole global batches of samples of each source, by name.
    """
    return {name: _watched(run, own, each) for name, own in samples.items()}


def _watched(run: OpenRun, samples: Ints, each: EachBatch) -> dict[str, Any]:
    with ExitStack() as stack:
        seen = [stack.enter_context(state.watching()) for state in run.runtime.methods.values()]
        loss, metrics = held_out(run, samples, each)
    found = {name: value for one in seen for name, value in one().items()}
    return {"loss": loss, **_perplexity(run.job.run.task.kind, loss), **metrics, **found}


def samples_of_sources(run: OpenRun) -> dict[str, Ints]:
    """Return the fixed samples of each source for a run's losses by source, in whole global batches."""
    size = run.job.plan.global_batch
    return {
        one.name: one.held_out.start + spread_evenly(len(one.held_out), size)
        for one in sources_of_task(run.task)
    }


def evaluate(
    job: PlannedJob, run_dir: Path, context: WorkerContext, report: ProgressReport = unwatched
) -> dict[str, Any]:
    """Evaluate the newest checkpoint and write `evaluation.json`; every rank calls it and gets the same.

    Raises:
        InputError: if the run has no checkpoint, or its task or plan is refused.
        RunError: if a rank failed, or there are checkpoints and none is whole.
    """
    run = open_run(job, run_dir, context, records=False)
    if run.newest is None:
        raise InputError(Violation(str(run_dir), "it has no checkpoint to evaluate; train it first"))
    state = load(run, run.newest)
    size, sources = job.plan.global_batch, sources_of_task(run.task)
    # The numbers of a blend repeat samples of short sources, so these are evaluated one by one.
    ranges = [one.held_out for one in sources] or [range(run.task.held_out_samples)]
    samples = [_each_once(one, size) for one in ranges]
    counted = CountedWork(report, "held-out samples", sum(map(len, samples)) // size, "batches")
    parts: dict[str, dict[str, Any]] = {}
    if sources:
        own = {one.name: part for one, part in zip(sources, samples, strict=True)}
        parts = by_source(run, own, counted.each)
        loss, metrics = _blended(parts, {one.name: one.share for one in sources})
        for one in sources:
            parts[one.name] |= _bits_per_byte(parts[one.name]["loss"], one.held_out_bytes_per_token)
    else:
        loss, metrics = held_out(run, samples[0], counted.each)
    result: dict[str, Any] = {
        "step": state.step,
        "samples": sum(len(np.unique(one)) for one in samples),
        "held_out_samples": sum(map(len, ranges)),
        "loss": loss,
        **_perplexity(job.run.task.kind, loss),
        **_bits_per_byte(loss, getattr(run.task, "bytes_per_token", None)),
        **metrics,
        **({BY_SOURCE: parts} if parts else {}),
    }
    if context.rank == 0:
        write_whole(run_dir / "evaluation.json", json.dumps(result, indent=1) + "\n")
    run.close()
    return result


def _blended(
    parts: Mapping[str, Mapping[str, Any]], shares: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the loss and the task's metrics of a blend: means of its sources' by their shares."""
    names = [
        name
        for name, value in next(iter(parts.values())).items()
        if isinstance(value, float) and name != "perplexity"
    ]
    means = {name: sum(share * parts[source][name] for source, share in shares.items()) for name in names}
    return means.pop("loss"), means


def _perplexity(kind: str, loss: float) -> dict[str, float]:
    """Return the exponential of a language model's loss; infinite if it is too large for a float."""
    if not is_language(kind):
        return {}
    try:
        return {"perplexity": math.exp(loss)}
    except OverflowError:
        return {"perplexity": math.inf}


def _each_once(numbers: range, size: int) -> Ints:
    """Return samples in whole batches of `size`; fewer than one batch fill it, and some count twice."""
    count = len(numbers) // size * size
    return (
        np.array(numbers[:count], dtype=np.int64)
        if count
        else numbers.start + spread_evenly(len(numbers), size)
    )


def _bits_per_byte(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    """Return the loss in bits per byte of held-out text; nothing if only its tokens are known."""
    return {} if bytes_per_token is None else {"bits_per_byte": loss / math.log(2) / bytes_per_token}
