"""Evaluation of a run's newest checkpoint on held-out data, by the forward-only program of its plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from weft.describe.tasks import KNOWN_TASKS
from weft.errors import InputError, Violation
from weft.files import write_whole
from weft.planning.planned import PlannedJob
from weft.program.arrays import Ints
from weft.run.launch.worker_start import WorkerContext
from weft.training.evaluation.held_out import held_out, spread_evenly
from weft.training.open_run import load, open_run
from weft.training.tasks.base import Task


def evaluate(job: PlannedJob, run_dir: Path, context: WorkerContext) -> dict[str, float]:
    """Evaluate the newest checkpoint and write `evaluation.json`; every rank calls it and gets the same.

    Raises:
        InputError: if the run has no checkpoint, or its task or plan is refused.
        RunError: if a rank failed, or there are checkpoints and none is whole.
    """
    run = open_run(job, run_dir, context, records=False)
    if run.newest is None:
        raise InputError(Violation(str(run_dir), "it has no checkpoint to evaluate; train it first"))
    state = load(run, run.newest)
    samples = _samples(run.task.held_out_samples, job.plan.global_batch)
    loss, metrics = held_out(run, samples)
    result = {
        "step": state.step,
        "samples": len(np.unique(samples)),
        "held_out_samples": run.task.held_out_samples,
        "loss": loss,
        **_perplexity(job.run.task.kind, loss),
        **_bits_per_byte(run.task, loss),
        **metrics,
    }
    if context.rank == 0:
        write_whole(run_dir / "evaluation.json", json.dumps(result, indent=1) + "\n")
    run.close()
    return result


def _samples(available: int, global_batch: int) -> Ints:
    """Return the held-out samples in whole global batches, each once.

    Fewer samples than one global batch fill it evenly; some count more than once.
    """
    count = available // global_batch * global_batch
    return np.arange(count, dtype=np.int64) if count else spread_evenly(available, global_batch)


def _perplexity(kind: str, loss: float) -> dict[str, float]:
    """Return the exponential of a language model's loss; infinite if it is too large for a float."""
    if kind not in KNOWN_TASKS or not KNOWN_TASKS[kind].language:
        return {}
    try:
        return {"perplexity": math.exp(loss)}
    except OverflowError:
        return {"perplexity": math.inf}


def _bits_per_byte(task: Task, loss: float) -> dict[str, float]:
    """Return the loss in bits per byte of held-out text; nothing if the task has no `bytes_per_token`."""
    bytes_per_token = getattr(task, "bytes_per_token", None)
    return {} if bytes_per_token is None else {"bits_per_byte": loss / math.log(2) / bytes_per_token}
