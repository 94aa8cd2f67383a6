"""The training loop: one rank's way from a run directory to a result."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from weft.describe.home import weft_home
from weft.describe.run_file import RunFile
from weft.planning.compile import compile_evaluation
from weft.planning.planned import PlannedJob
from weft.program.verify import require_valid
from weft.run.recorder import Recorder
from weft.run.runtime import PRECISIONS, Runtime, require_runnable
from weft.run.stages import build_stage
from weft.run.worker_start import WorkerContext
from weft.run.workspace import Batch
from weft.train import checkpoints
from weft.train.agreement import StopRequest, gather, together
from weft.train.checkpoints import TrainingState
from weft.train.journal import Journal, max_rss_bytes
from weft.train.optimizers import OptimizerSettings, learning_rate, optimizer_factory, set_learning_rate
from weft.train.sampler import Ints, SampleLedger
from weft.train.tasks import Task, TaskSettings, make_task

# A fixed set of this many held-out samples, rounded to whole global batches, gives the held-out loss.
HELD_OUT_SAMPLES = 256
COLLECT_EVERY_STEPS = 50


def train(job: PlannedJob, run_dir: Path, context: WorkerContext) -> int:
    """Train to the last step of the run file, or until a signal asks to stop; every rank calls it.

    Goes on from the newest whole checkpoint of the run directory where there is one.

    Returns:
        The exit code: 0 when all steps are done, 130 or 143 when a signal stopped the run after a checkpoint.

    Raises:
        InputError: when the task, the optimizer or the plan is refused, or the checkpoint is another run's.
        RunError: when a rank failed, or there are checkpoints and none is whole.
    """
    run, plan = job.run, job.plan
    with together():
        require_runnable(plan, job.program)
        evaluation = compile_evaluation(plan, job.problem.job.graph)
        require_valid(evaluation)
        settings = _optimizer_settings(run)
        make_optimizer = optimizer_factory(settings)
    task = _open_task(job)
    ledger = SampleLedger(task.samples, run.train.seed)
    saved_at, skipped = checkpoints.agree_on_newest(run_dir / "checkpoints")
    journal = Journal(run_dir, writes=context.rank == 0)
    for line in skipped:
        journal.event("checkpoint skipped", reason=line)
        print(f"warning: checkpoint skipped: {line}", file=sys.stderr)
    with together():
        steps_done = checkpoints.read_state(saved_at).step if saved_at else 0
        recorder = Recorder(
            run_dir,
            program=job.program,
            rank=context.rank,
            plan_id=plan.plan_id,
            steps=max(1, run.train.steps - steps_done),
        )
        stages = {
            index: build_stage(job.problem.model, stage.layers, run.train.seed, PRECISIONS[plan.precision])
            for index, stage in enumerate(plan.stages)
            if any(context.rank in replica.ranks for replica in stage.replicas)
        }
    runtime = Runtime(
        plan,
        job.program,
        {index: module.to(context.device) for index, module in stages.items()},
        task.loss,
        make_optimizer,
        device=context.device,
        seed=run.train.seed,
        recorder=recorder,
    )
    held_out = list(_held_out_batches(task, plan.global_batch, plan.micro_batch_size))

    state = TrainingState(
        step=0, seed=run.train.seed, plan_id=plan.plan_id, data=task.fingerprint, first_loss=0.0
    )
    if saved_at:
        state = _resume(saved_at, state, runtime)
        journal.event("resumed", step=state.step, checkpoint=saved_at.name)
    else:
        state = _after(state, 0, runtime.evaluate(evaluation, held_out))
        journal.event("started", step=0, held_out_loss=state.first_loss)

    def save(step: int) -> None:
        checkpoints.save(
            run_dir / "checkpoints",
            _after(state, step, state.first_loss),
            runtime.stages,
            runtime.optimizers,
            keep=run.checkpoint.keep,
        )
        journal.event("checkpoint", step=step)

    tokens_per_step = plan.global_batch * task.tokens_per_sample
    with StopRequest() as stop, _collecting_by_hand() as collect:
        for step in range(state.step, run.train.steps):
            samples = ledger.sample_ids(step, plan.global_batch)
            rate = learning_rate(settings, step)
            set_learning_rate(runtime.optimizers.values(), rate)
            stop.post_vote()
            started_ns = time.monotonic_ns()
            result = runtime.step(step, _batch(task, samples, plan.micro_batch_size))
            step_s = (time.monotonic_ns() - started_ns) / 1e9
            journal.step(
                result, step_s=step_s, tokens_per_s=tokens_per_step / step_s, learning_rate=rate,
                epoch=ledger.epoch(step, plan.global_batch),
            )
            signal_received = stop.read_vote()
            last = signal_received or step + 1 == run.train.steps
            if last or (step + 1) % run.checkpoint.every == 0:
                journal.flush()
                save(step + 1)
            if signal_received:
                journal.event("stopped", step=step + 1, signal=signal_received.name)
                runtime.close()
                return 128 + signal_received
            collect(step)

    final_loss = runtime.evaluate(evaluation, held_out)
    runtime.close()
    journal.event("finished", step=run.train.steps, held_out_loss=final_loss)
    journal.finish(
        tokens_per_step=tokens_per_step,
        rss_bytes=gather(max_rss_bytes()),
        first_loss=state.first_loss,
        final_loss=final_loss,
        steps=run.train.steps,
    )
    return 0
