"""The training loop: one rank's way from a planned job to a result."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from weft.describe.home import weft_home
from weft.describe.run_file import RunFile
from weft.planning.compile import compile_evaluation
from weft.planning.planned import PlannedJob
from weft.program.program import Program
from weft.program.verify import require_valid
from weft.run.recorder import Recorder
from weft.run.runtime import PRECISIONS, Runtime, require_runnable
from weft.run.stages import build_stage
from weft.run.worker_start import WorkerContext
from weft.run.workspace import Batch
from weft.training import checkpoints
from weft.training.agreement import StopRequest, gather, together
from weft.training.checkpoints import TrainingState
from weft.training.imports import read_initial_weights
from weft.training.journal import Journal, max_rss_bytes
from weft.training.meter import Meter
from weft.training.optimizers import (
    OptimizerSettings,
    learning_rate,
    optimizer_factory,
    set_learning_rate,
)
from weft.training.sampler import Ints, SampleLedger
from weft.training.tasks import make_task
from weft.training.tasks.base import Task, TaskSettings

# Held-out loss is taken over this many samples, rounded up to whole global batches, always the same ones.
HELD_OUT_SAMPLES = 256
COLLECT_EVERY_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that is ready for its next step, on one rank; `begin` is what a first start begins from."""

    job: PlannedJob
    checkpoints: Path
    newest: Path | None
    begin: TrainingState
    settings: OptimizerSettings
    task: Task
    meter: Meter
    evaluation: Program
    runtime: Runtime
    journal: Journal


def train(job: PlannedJob, run_dir: Path, context: WorkerContext) -> int:
    """Train to the last step of the run file, or until a signal asks to stop; every rank calls it.

    Goes on from the newest whole checkpoint of the run directory where there is one.

    Returns:
        The exit code: 0 when all steps are done, 130 or 143 when SIGINT or SIGTERM stopped the run, with a
        checkpoint of the last finished step.

    Raises:
        InputError: when the task, the optimizer or the plan is refused, or the checkpoint is another run's.
        RunError: when a rank failed, or there are checkpoints and none is whole.
    """
    run = open_run(job, run_dir, context)
    state = _resume(run, run.newest) if run.newest else _start(run)
    stopped_by = _train_steps(run, state)
    if stopped_by is None:
        _finish(run, state)
    run.runtime.close()
    return 0 if stopped_by is None else 128 + stopped_by


def open_run(job: PlannedJob, run_dir: Path, context: WorkerContext, *, records: bool = True) -> OpenRun:
    """Everything that can be refused is refused here, on all ranks, before the first step.

    `records`: keep measured times, in place of those of an earlier start.
    """
    run, plan = job.run, job.plan
    with together():
        require_runnable(plan, job.program)
        evaluation = compile_evaluation(plan, job.problem.job.graph)
        require_valid(evaluation)
        settings = _optimizer_settings(run)
        make_optimizer = optimizer_factory(settings)
    task = _open_task(job, context.rank)
    journal = Journal(run_dir, writes=context.rank == 0)
    newest = _newest_checkpoint(run_dir / "checkpoints", journal)
    begin = TrainingState(
        step=0, seed=run.train.seed, plan_id=plan.plan_id, data=task.fingerprint, first_loss=0.0
    )
    with together():
        saved = checkpoints.read_state(newest) if newest else begin
        checkpoints.require_same_run(begin, saved, str(newest))
        stages = _stages(job, context)
        if run.model.weights and newest is None:
            read_initial_weights(Path(run.model.hf or ""), job.problem.model, stages)
        recorder = _recorder(job, run_dir, context.rank, saved.step) if records else None
    meter = Meter(task)
    runtime = Runtime(
        plan,
        job.program,
        stages,
        meter.loss,
        make_optimizer,
        device=context.device,
        seed=run.train.seed,
        recorder=recorder,
    )
    return OpenRun(
        job=job,
        checkpoints=run_dir / "checkpoints",
        newest=newest,
        begin=begin,
        settings=settings,
        task=task,
        meter=meter,
        evaluation=evaluation,
        runtime=runtime,
        journal=journal,
    )


def _recorder(job: PlannedJob, run_dir: Path, rank: int, done: int) -> Recorder:
    return Recorder(
        run_dir,
        program=job.program,
        rank=rank,
        plan_id=job.plan.plan_id,
        steps=max(1, job.run.train.steps - done),
    )


def _start(run: OpenRun) -> TrainingState:
    first_loss, metrics = held_out(run, _held_out_samples(run))
    run.journal.event("started", step=0, held_out_loss=first_loss, **metrics)
    return replace(run.begin, first_loss=first_loss)


def load(run: OpenRun, newest: Path) -> TrainingState:
    """Give stages and optimizers what a checkpoint holds; every rank calls it."""
    return checkpoints.load(newest, run.runtime.stages, run.runtime.optimizers, run.runtime.shards)


def _resume(run: OpenRun, newest: Path) -> TrainingState:
    state = load(run, newest)
    run.journal.event("resumed", step=state.step, checkpoint=newest.name)
    return state


def _train_steps(run: OpenRun, state: TrainingState) -> signal.Signals | None:
    """Train what is left, saving now and then; returns the signal that stopped it, if one did."""
    plan, runtime, journal = run.job.plan, run.runtime, run.journal
    steps, every = run.job.run.train.steps, run.job.run.checkpoint.every
    ledger = SampleLedger(run.task.samples, state.seed)
    tokens_per_step = plan.global_batch * run.task.tokens_per_sample
    with StopRequest() as stop, _collecting_by_hand() as collect:
        for step in range(state.step, steps):
            batch = _batch(run.task, ledger.sample_ids(step, plan.global_batch), plan.micro_batch_size)
            rate = learning_rate(run.settings, step)
            set_learning_rate(runtime.optimizers.values(), rate)

            stop.post_vote()
            started_ns = time.monotonic_ns()
            result = runtime.step(step, batch)
            step_s = (time.monotonic_ns() - started_ns) / 1e9
            stopped_by = stop.read_vote()

            journal.step(
                result,
                step_s=step_s,
                tokens_per_s=tokens_per_step / step_s,
                learning_rate=rate,
                epoch=ledger.epoch(step, plan.global_batch),
            )
            done = step + 1
            if stopped_by is not None or done % every == 0 or done == steps:
                _save(run, replace(state, step=done))
            if stopped_by is not None:
                journal.event("stopped", step=done, signal=stopped_by.name)
                return stopped_by
            collect(step)
    return None


def _save(run: OpenRun, state: TrainingState) -> None:
    with together():  # a loss that is not finite is found here, before it costs the last good checkpoint
        run.journal.flush()
    checkpoints.save(
        run.checkpoints,
        state,
        run.runtime.stages,
        run.runtime.optimizers,
        run.runtime.shards,
        keep=run.job.run.checkpoint.keep,
    )
    run.journal.event("checkpoint", step=state.step)


def _finish(run: OpenRun, state: TrainingState) -> None:
    steps = run.job.run.train.steps
    final_loss, metrics = held_out(run, _held_out_samples(run))
    run.journal.event("finished", step=steps, held_out_loss=final_loss, **metrics)
    run.journal.finish(
        tokens_per_step=run.job.plan.global_batch * run.task.tokens_per_sample,
        rss_bytes=gather(max_rss_bytes()),
        first_loss=state.first_loss,
        final_loss=final_loss,
        final_metrics=metrics,
        steps=steps,
    )


def _held_out_samples(run: OpenRun) -> Ints:
    """The fixed samples by which a run is followed, in whole global batches.

    They are spread evenly over the held-out data; where it has too few, some count more than once.
    """
    size = run.job.plan.global_batch
    return spread_evenly(run.task.held_out_samples, -(-HELD_OUT_SAMPLES // size) * size)


def spread_evenly(available: int, count: int) -> Ints:
    """`count` sample numbers below `available`, rising."""
    return np.arange(count, dtype=np.int64) * available // count


def held_out(run: OpenRun, samples: Ints) -> tuple[float, dict[str, float]]:
    """Mean loss over held-out samples, in nats per target, and the task's metrics over the same.

    Every rank calls it with the same whole global batches of samples.
    """
    plan, task = run.job.plan, run.task
    batches = [
        _batch(task, part, plan.micro_batch_size, held_out=True)
        for part in samples.reshape(-1, plan.global_batch)
    ]
    with run.meter.open():
        loss = run.runtime.evaluate(run.evaluation, batches)
    return loss, run.meter.collect()


def _batch(task: Task, samples: Ints, micro_batch_size: int, *, held_out: bool = False) -> Batch:
    """Global micro-batch number to tensors: micro-batch g is samples g * size to (g + 1) * size."""

    def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = number * micro_batch_size
        return task.batch(samples[first : first + micro_batch_size], held_out=held_out)

    return micro_batch


def _stages(job: PlannedJob, context: WorkerContext) -> dict[int, torch.nn.Module]:
    """This rank's stages, on its device."""
    dtype = PRECISIONS[job.plan.precision]
    return {
        index: build_stage(job.problem.model, stage.layers, job.run.train.seed, dtype).to(context.device)
        for index, stage in enumerate(job.plan.stages)
        if any(context.rank in replica.ranks for replica in stage.replicas)
    }


def _open_task(job: PlannedJob, rank: int) -> Task:
    """The task, with its data prepared by rank 0 first, so that the other ranks find it in the cache."""
    settings = TaskSettings(
        data=job.run.task.data,
        sequence=job.plan.sequence,
        vocabulary=job.problem.model.vocabulary,
        cache=weft_home() / "cache",
        seed=job.run.train.seed,
        image_size=job.problem.model.image_size,
        channels=job.problem.model.channels,
    )
    task: Task | None = None
    for first in (True, False):
        with together():
            if first == (rank == 0):
                task = make_task(job.run.task.kind, settings)
    assert task is not None, "every rank has one of the two turns"
    return task


def _newest_checkpoint(directory: Path, journal: Journal) -> Path | None:
    newest, skipped = checkpoints.agree_on_newest(directory)
    for reason in skipped:
        journal.event("checkpoint skipped", reason=reason)
        print(f"warning: skipped a checkpoint: {reason}", file=sys.stderr)
    return newest


def _optimizer_settings(run: RunFile) -> OptimizerSettings:
    return OptimizerSettings(**run.optimizer.model_dump())


@contextmanager
def _collecting_by_hand() -> Iterator[Callable[[int], None]]:
    """Keep Python's cyclic garbage collector out of the steps; call what it gives after every step.

    The collector starts after a number of allocations, at a different moment on every rank, and each pause
    of one rank is a pause of the whole pipeline. So it is off; every rank collects after the same steps, and
    what was made before training is frozen, so that a collection is short.
    """

    def collect(step: int) -> None:
        if (step + 1) % COLLECT_EVERY_STEPS == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
