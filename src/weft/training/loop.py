"""The training loop: one rank's way from a planned job to a result."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.describe.plan import Plan
from weft.describe.synchronisation import micro_batches_of_steps, steps_apart
from weft.errors import RunError
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import BY_SOURCE, SAMPLE_SOURCES
from weft.program.arrays import Ints
from weft.run.launch.heartbeat import beating
from weft.run.launch.worker_start import WorkerContext
from weft.run.transport.device_group import DeviceGroup
from weft.training.beginnings import go_on, resume, start, turn, turn_to, verify_resume
from weft.training.checkpoint.manifest import generation_path, generations
from weft.training.checkpoint.saver import Saved, Saver
from weft.training.checkpoint.training_state import TrainingState
from weft.training.coordination.agreement import (
    StopRequest,
    from_first_rank,
    gather,
    meeting_peers,
    together,
)
from weft.training.coordination.membership import Membership
from weft.training.data.reader import samples_of_steps, training_samples
from weft.training.data.sampler import SampleLedger, StepSamples
from weft.training.data.text import Source
from weft.training.directory.process_memory import ProcessMemory
from weft.training.directory.run_directory import checkpoint_figures
from weft.training.evaluation.held_out import (
    BesideSteps,
    by_source,
    held_out,
    held_out_samples,
    samples_of_sources,
)
from weft.training.open_run import OpenRun, open_run
from weft.training.optimizer.optimizers import set_learning_rate
from weft.training.plan_changes import PlanChanges
from weft.training.read_ahead import read_ahead
from weft.training.tasks.base import sources_of_task

COLLECT_EVERY_STEPS = 50
# The limit of consecutive steps without an update because of a gradient that is not finite.
MOST_LEFT_OUT_STEPS = 10


def train(job: PlannedJob, run_dir: Path, context: WorkerContext) -> int:
    """Train to the last step of the run file, or until a stop signal; every rank calls it.

    It resumes from the newest whole checkpoint of the run directory if there is one.

    Returns:
        The exit code: 0 if all steps are done; 130 or 143 if SIGINT or SIGTERM stopped the run, after a
        checkpoint of the last finished step.

    Raises:
        InputError: if the task, the optimizer or the plan is refused, or the checkpoint is another run's.
        RunError: if a rank failed, or there are checkpoints and none is whole.
    """
    # Libraries stay, so no collection of garbage need look through their objects.
    gc.freeze()
    memory: ProcessMemory | None = None
    for generation in count():
        if generation:
            turn(job, run_dir)
        # The run ends with the call, so no tensor of a plan stays under the next one.
        end, memory = train_plan(job, run_dir, context, generation, memory)
        if end.stopped_by is not None:
            return 128 + end.stopped_by
        if end.later is None:
            break
        job = end.later
    return 0


class PlanEnd(NamedTuple):
    """The end of a plan's steps: the signal that stopped them, and the job that takes over; None for none.

    `joins`: the steps ended because new processes wait to join.
    """

    stopped_by: signal.Signals | None = None
    later: PlannedJob | None = None
    joins: bool = False


def train_plan(
    job: PlannedJob,
    run_dir: Path,
    context: WorkerContext,
    generation: int,
    former: ProcessMemory | None,
    membership: Membership | None = None,
) -> tuple[PlanEnd, ProcessMemory]:
    """Train the steps of one plan; return how they ended, and their memory.

    Args:
        membership: that of a rank that may lose others; None: the run ends with them.
    """
    change = None if membership is None else membership.change
    if membership is not None and change is not None:
        turn_to(job, run_dir, membership.job)
    stop = StopRequest(None if membership is None else membership.signals)
    begins_at = None if change is None else change.state.step
    run = open_run(job, run_dir, context, generation=generation, former=former, begins_at=begins_at)
    if membership is not None:
        membership.runtime = run.runtime
        run.runtime.others += map(DeviceGroup, (stop.group, run.checkpoint_ranks.group))
    with beating(run.recorder, run.runtime.notice), run.journal:
        if membership is not None and change is not None:
            # The other groups are open, and a loss ends what is under way in all of them.
            membership.begin()
            state = go_on(run, membership, change)
        else:
            state = resume(run, run.newest) if run.newest else start(run)
        _tell_data(run, state)
        for warning in run.job.run.warnings:
            run.journal.event("run warning", step=state.step, warning=warning)
        end, read_bytes = _train_steps(run, state, stop, membership)
        if end == PlanEnd():
            _finish(run, state, read_bytes)
        run.close()
    return end, run.memory


def _train_steps(
    run: OpenRun, state: TrainingState, stop: StopRequest, membership: Membership | None
) -> tuple[PlanEnd, int]:
    """Train the remaining steps of a plan with their checkpoints; also return the bytes of samples read."""
    plan, runtime, journal = run.job.plan, run.runtime, run.journal
    steps, every = run.job.last_step, run.job.run.checkpoint.every
    ledger = SampleLedger(run.task.samples, state.seed, run.job.run.task.source_block)
    samples = samples_of(plan)
    first = state.origin(samples)
    sources = sources_of_task(run.task)
    sources_in = _sources_in(sources, samples_of_steps(ledger, first, samples))
    for method in runtime.methods.values():
        method.take_sources(sources_in)
    if run.weight_log is not None:
        run.weight_log.begin(state.step)
    with (
        stop,
        _saver(run, state) as saver,
        read_ahead(
            run,
            run.program,
            training_samples(run.reads, ledger, first, samples),
            range(state.step, steps),
            runs=samples.runs,
        ) as (reader, reads),
        _collecting_by_hand() as collect,
    ):
        left_out, former, due, beside = 0, None, False, BesideSteps(run)
        changes = PlanChanges(run, state.step)
        apart = steps_apart(plan.sync) or run.program.steps_per_cycle
        if membership is not None:
            membership.keep(runtime, state)
            membership.begin()
            if state.step and state.step % every == 0 and _is_unsaved(run, state):
                # Another rank was lost before this checkpoint was whole.
                _save(run, saver, state, goes_on=False)
        for step in range(state.step, steps):
            batch = reader.step(step)
            rate = run.settings.rate(step)
            set_learning_rate(runtime.optimizers.values(), rate)

            joins = False
            if membership is not None:
                membership.reached = step
                joins = (step + 1) % apart == 0 and membership.others_wait()
            stop.post_vote(failed=saver.failed, joins=joins)
            started_ns = time.monotonic_ns()
            result = runtime.step(step, batch)
            step_s = (time.monotonic_ns() - started_ns) / 1e9
            saver.go_on()
            vote = stop.read_vote()
            consumed = first + samples.before(step + 1)
            # Whether this step was left out, the host would have to wait for.
            if former is not None:
                left_out = left_out + 1 if former.left_out else 0
                require_progress(former.step, left_out)
            former = result

            journal.step(
                result,
                step_s=step_s,
                tokens_per_s=samples.of(step) * run.task.tokens_per_sample / step_s,
                learning_rate=rate,
                epoch=ledger.epochs(consumed),
                data_wait_s=reader.waited_s,
                **({SAMPLE_SOURCES: sources_in(step).tolist()} if sources else {}),
            )
            if vote.failed:
                saver.fail()
            if run.newest is not None and step == state.step:
                verify_resume(run, result)
            done = step + 1
            for told in runtime.move_weights(done, run.job):
                journal.event(**told)
            if (evaluated := beside.ended(done)) is not None:
                weights_of, loss, metrics = evaluated
                journal.event("evaluated", step=weights_of, held_out_loss=loss, **metrics)
            evaluate_every = run.job.run.train.evaluate_every
            due |= evaluate_every is not None and done % evaluate_every == 0
            if membership is not None and done % apart == 0:
                journal.flush()
                membership.keep(runtime, replace(state, step=done, samples=consumed))
            goes_on = vote.stop is None and done < steps
            leaves = vote.joins and goes_on
            later = changes.after(done, waits=beside.under_way) if goes_on else None
            ends = not goes_on or leaves or later is not None
            # Before the save, so that a resumed run evaluates these weights, too.
            if due and not ends and beside.begin(done, steps - done):
                due = False
            if (ends and not leaves) or done % every == 0:
                _save(run, saver, replace(state, step=done, samples=consumed), goes_on=not ends)
            _report(run, saver.wait() if ends else saver.poll())
            # Replicas that agree every few steps are evaluated when they have agreed.
            if due and goes_on and done % apart == 0:
                due = False
                loss, metrics = held_out(run, held_out_samples(run))
                journal.event("evaluated", step=done, held_out_loss=loss, **metrics)
            if vote.stop is not None:
                journal.event("stopped", step=done, signal=vote.stop.name)
                return PlanEnd(stopped_by=vote.stop), reads.read_bytes
            if later is not None:
                return PlanEnd(later=later), reads.read_bytes
            if leaves and membership is not None:
                membership.leave()
                return PlanEnd(joins=True), reads.read_bytes
            collect(step)
    end = PlanEnd(later=None if run.job.later is None else run.job.later.job)
    return end, reads.read_bytes


def require_progress(step: int, left_out: int) -> None:
    """Refuse to go on after too many consecutive steps without an update; `step` is the last one.

    Raises:
        RunError: if there are `MOST_LEFT_OUT_STEPS`; every rank counts alike.
    """
    if left_out >= MOST_LEFT_OUT_STEPS:
        raise RunError(
            f"step {step}: the gradient of {left_out} steps in a row is not finite; "
            "try a lower optimizer.learning_rate"
        )


def _saver(run: OpenRun, state: TrainingState) -> Saver:
    keep = run.job.run.checkpoint.keep
    return Saver(
        run.checkpoints,
        keep=keep,
        resumed_step=state.step,
        ranks=run.checkpoint_ranks,
        copy=run.runtime.copy,
        nodes=run.nodes,
        storage=run.storage,
    )


def _tell_data(run: OpenRun, state: TrainingState) -> None:
    """Write the event of the run's data; warnings are separate events, which launchers print."""
    task, train = run.task, run.job.run.train
    samples = state.origin(samples_of(run.job.plan)) + samples_of(run.job.plan).before(train.steps)
    about = dict(getattr(task, "about", {}))
    warnings, batch = [about.pop("warning", "")], samples_of(run.job.plan).of(state.step)
    if task.samples < batch:
        warnings.append(f"a step of {batch} samples repeats some, because the data has {task.samples}")
    run.journal.event(
        "data",
        step=state.step,
        samples=task.samples,
        tokens=task.samples * task.tokens_per_sample,
        held_out_samples=task.held_out_samples,
        first_sample=state.samples,
        epochs=SampleLedger(task.samples, state.seed).epochs(samples),
        fingerprint=task.fingerprint,
        **about,
    )
    for warning in filter(None, warnings):
        run.journal.event("data warning", step=state.step, warning=warning)


def _sources_in(sources: Sequence[Source], samples_in: Callable[[int], Ints]) -> Callable[[int], Ints]:
    """Return a function from a step to the numbers of its samples' sources."""
    ends = [one.training.stop for one in sources]
    return lambda step: np.searchsorted(ends, samples_in(step), side="right")


def samples_of(plan: Plan) -> StepSamples:
    """Return the samples of a plan's steps."""
    return StepSamples(micro_batches_of_steps(plan), plan.micro_batch_size)


def _is_unsaved(run: OpenRun, state: TrainingState) -> bool:
    """Return True if a state has no whole checkpoint; every rank calls it."""
    return not from_first_rank(generation_path(run.checkpoints, state.step).exists())


def _save(run: OpenRun, saver: Saver, state: TrainingState, *, goes_on: bool) -> None:
    """Begin to save a state; if the run goes on, methods may copy tensors beside the next step."""
    with together():  # raises for a loss that is not finite, before the last good checkpoint is lost
        run.journal.flush()
    run.memory.begin_copies()
    runtime = run.runtime
    with meeting_peers():
        runtime.average_statistics()
    beside = [one.checkpoint_copies for one in runtime.methods.values() if goes_on]
    tensors = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
    _report(run, saver.save(state, *tensors, beside=next((one for one in beside if one is not None), None)))
    if run.weight_log is not None:
        run.weight_log.begin(state.step)


def _report(run: OpenRun, saved: list[Saved]) -> None:
    for one in saved:
        run.journal.event("checkpoint", **asdict(one))
    if saved and run.weight_log is not None:
        oldest, _ = generations(run.checkpoints)[-1]
        run.weight_log.prune(oldest)


def _finish(run: OpenRun, state: TrainingState, read_bytes: int) -> None:
    steps, samples = run.job.run.train.steps, samples_of(run.job.plan)
    cycle = len(samples.numbers)
    mean_samples = samples.before(cycle) / cycle
    final_loss, metrics = held_out(run, held_out_samples(run))
    sources = by_source(run, samples_of_sources(run))
    run.journal.event("finished", step=steps, held_out_loss=final_loss, **metrics)
    run.journal.finish(
        tokens_per_step=mean_samples * run.task.tokens_per_sample,
        memory=gather(run.memory.peaks()),
        steps_per_cycle=run.program.steps_per_cycle,
        first_loss=state.first_loss,
        final_loss=final_loss,
        final_metrics=metrics,
        steps=steps,
        data_read_bytes=sum(gather(read_bytes)),
        **checkpoint_figures(run.directory),
        **_log_figures(run),
        **({BY_SOURCE: sources} if sources else {}),
    )


def _log_figures(run: OpenRun) -> dict[str, float]:
    """Return the mean bytes that all ranks have logged in a step; every rank calls it."""
    if run.weight_log is None:
        return {}
    return {"weight_log_step_bytes": sum(gather(run.weight_log.step_bytes))}


@contextmanager
def _collecting_by_hand() -> Iterator[Callable[[int], None]]:
    """Keep Python's cyclic garbage collector out of the steps; yield a function to call after every step.

    The collector starts after a number of allocations, at different times on different ranks. A pause of
    one rank is a pause of the whole pipeline. So the collector is off, and every rank collects after the same
    steps.
    """

    def collect(step: int) -> None:
        if (step + 1) % COLLECT_EVERY_STEPS == 0:
            gc.collect()

    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
