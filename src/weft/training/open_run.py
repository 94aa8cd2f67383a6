"""`open_run`: a planned job prepared for its next step on one rank, or refused on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from weft.describe.families.own import FAMILY, own_model
from weft.describe.plan import PACKING
from weft.describe.plan_versions import current_id, former_ids
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.planning.planned_job import PlannedJob
from weft.program.rank_program import RankProgram
from weft.run.accelerator import require_same_bits
from weft.run.launch.flight_recorder import record_path
from weft.run.launch.nodes import JobNodes
from weft.run.launch.worker_start import WorkerContext
from weft.run.record.recorder import Recorder
from weft.run.runtime import RankRuntime, require_runnable
from weft.run.stage.build import build_stages
from weft.run.stage.compilable import compile_problems
from weft.run.stage.stage_module import Filling, rest
from weft.run.state.precision import PRECISIONS, STEPPED
from weft.run.state.synchroniser_state import REPLICAS, ReplicaState
from weft.run.verified import require_verified
from weft.run.workspace import inputs_of
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.frozen_weights import frozen_fingerprint
from weft.training.checkpoint.manifest import CHECKPOINTS
from weft.training.checkpoint.remote_storage import RemoteStorage
from weft.training.checkpoint.training_state import (
    TrainingState,
    read_state,
    require_same_job,
    require_steps_left,
)
from weft.training.checkpoint.weight_log import LOG, LogHeader, WeightLog
from weft.training.checkpoint.weight_replay import unlogged_tensors
from weft.training.coordination.agreement import from_first_rank, together
from weft.training.coordination.attendance import Attendance
from weft.training.data.reader import TaskReads
from weft.training.data.tokenizers import tokenizer_name
from weft.training.directory.journal import Journal
from weft.training.directory.process_memory import ProcessMemory
from weft.training.directory.run_directory import RunDirectory, plans_with_the_same_tensors
from weft.training.directory.verified import verified_digests
from weft.training.loggers import open_feeds, require_loggers
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory, settings_of
from weft.training.tasks import make_task
from weft.training.tasks.base import Meter, Task, TaskSettings, batch_of


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that is ready for its next step, on one rank; `begin` is the state of a first start."""

    job: PlannedJob
    checkpoints: Path
    newest: Path | None
    nodes: JobNodes
    # Where checkpoints are copied to; None: they stay in directories.
    storage: RemoteStorage | None
    # All ranks, for checkpoints alone.
    checkpoint_ranks: Attendance
    begin: TrainingState
    settings: OptimizerSettings
    task: Task
    reads: TaskReads
    meter: Meter
    program: RankProgram
    evaluation: RankProgram
    runtime: RankRuntime
    device: torch.device
    recorder: Recorder | None
    journal: Journal
    memory: ProcessMemory
    weight_log: WeightLog | None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.checkpoints.parent)

    def close(self) -> None:
        """End threads and free process groups; every rank calls it."""
        if self.weight_log is not None:
            self.weight_log.close()
        self.runtime.close()
        self.checkpoint_ranks.close()


def open_run(
    job: PlannedJob,
    run_dir: Path,
    context: WorkerContext,
    *,
    records: bool = True,
    generation: int = 0,
    former: ProcessMemory | None = None,
    begins_at: int | None = None,
) -> OpenRun:
    """Check a planned job, on all ranks, and open its run for the next step; every rank calls it.

    Args:
        records: keep measured times, in place of an earlier start's.
        generation: the number of runs that these processes have opened before.
        former: the memory of the last of them.
        begins_at: the step with which it goes on from tensors in memory; None: from the newest checkpoint.

    Raises:
        InputError: if the plan, a logger, the optimizer, the task or the newest checkpoint is refused.
        RunError: if a rank failed, or there are checkpoints and none is whole.
    """
    run, plan = job.run, job.plan
    with together():
        program, evaluation = job.parts(context.rank)
        verified = verified_digests(run_dir, job) if context.rank == 0 else None
        require_runnable(plan, program)
        require_loggers(run.report.log)
        settings = settings_of(run)
        make_optimizer = optimizer_factory(settings)
    require_verified([program, evaluation], verified)
    checkpoint_ranks = Attendance()
    nodes = context.nodes.at_checkpoints
    task = _open_task(job, checkpoint_ranks, nodes)
    memory = ProcessMemory(torch.device(context.device), former)
    storage = _storage(job, run_dir, context.rank, begins=records)
    journal = Journal(run_dir, writes=context.rank == 0, memory=memory)
    newest = None
    if begins_at is None:
        # An evaluation leaves whole checkpoints for others.
        newest = _newest_checkpoint(
            job, run_dir / CHECKPOINTS, journal, checkpoint_ranks, nodes, storage, completes=not records
        )
    begun = newest is not None or begins_at is not None
    # The job's own group would time out: some ranks read initial weights far longer than others.
    with together(checkpoint_ranks.group):
        begin = TrainingState(
            step=0,
            plan_id=plan.plan_id,
            samples=0,
            seed=run.train.seed,
            model=plan.model_fingerprint,
            precision=plan.precision,
            data=task.fingerprint,
            first_loss=0.0,
            frozen=frozen_fingerprint(run, job.problem.job.graph),
            optimizer=run.optimizer.kept_states,
        )
        saved = read_state(newest) if newest else begin
        require_same_job(begin, saved, str(newest))
        if run.run.deterministic:
            require_same_bits()
        dtype = STEPPED[job.plan.precision]
        filling = Filling(weights=run.model.weights, checkpoint=begun)
        stages = build_stages(
            job.plan, job.problem.model, context.rank, run.train.seed, dtype, filling=filling
        )
        if run.model.weights and (not begun or begin.frozen):
            # Imports every family's part of `transformers`, which takes a second.
            from weft.training.interchange.imports import read_initial_weights

            read_initial_weights(Path(run.model.hf or ""), job.problem.model, stages)
        for index, stage in stages.items():
            # Before they move: frozen weights take less memory of a device than of its host.
            rest(stage, PRECISIONS[job.plan.precision])
            stages[index] = stage.to(context.device)
        if records:
            trained_by = replace(saved, plan_id=current_id(saved.plan_id, plan))
            require_steps_left(begin, trained_by, run.train.steps)
        # Without remaining steps, the measurements of the start before stay.
        first_step = saved.step if begins_at is None else begins_at
        left = job.last_step - first_step if records else 0
        recorder = Recorder(run_dir, program=program, plan_id=plan.plan_id, steps=left) if left > 0 else None
        if records and nodes.leads_folder:
            checkpoints.remove_unfinished(run_dir / CHECKPOINTS)
    if records:
        compile_stages(job, program, stages, task, context.device)
    if records and context.rank == 0:
        journal.report_to(open_feeds(job, run_dir, first_step, journal.event))
    meter = Meter(task)
    runtime = RankRuntime(
        plan,
        program,
        stages,
        meter,
        make_optimizer,
        device=context.device,
        seed=run.train.seed,
        clip_norm=run.optimizer.clip_norm,
        skip_non_finite=run.optimizer.skip_non_finite,
        recorder=recorder,
        transport=run.run.used_transport,
        generation=generation,
        flight_record=record_path(run_dir, context.rank),
        name_of=nodes.name_of,
    )
    with together():
        weight_log = _weight_log(job, run_dir, runtime) if run.checkpoint.weight_log else None
    return OpenRun(
        job=job,
        checkpoints=run_dir / CHECKPOINTS,
        newest=newest,
        nodes=nodes,
        storage=storage,
        checkpoint_ranks=checkpoint_ranks,
        begin=begin,
        settings=settings,
        task=task,
        reads=TaskReads(task),
        meter=meter,
        program=program,
        evaluation=evaluation,
        runtime=runtime,
        device=torch.device(context.device),
        recorder=recorder,
        journal=journal,
        memory=memory,
        weight_log=weight_log,
    )


def _weight_log(job: PlannedJob, run_dir: Path, runtime: RankRuntime) -> WeightLog:
    """Return the log of the payloads that the runtime's gathers send.

    Raises:
        InputError: if the plan has no such payloads, or training changes tensors of the model without them.
    """
    if job.unlogged:
        raise InputError(job.unlogged)
    replicas = runtime.methods[REPLICAS]
    assert isinstance(replicas, ReplicaState), "it has the name"
    weights = replicas.weights
    left_out = [
        name for stage, one in weights.items() for name in unlogged_tensors(runtime.stages[stage], one.layout)
    ]
    if left_out:
        problem = f"stages change {left_out[0]} without the gathers that a log keeps"
        raise InputError(Violation("checkpoint.weight_log", problem, "false"))
    places = {stage: one.place for stage, one in weights.items()}
    log = WeightLog(run_dir / LOG, LogHeader(plan_id=job.plan.plan_id, rank=runtime.rank, places=places))
    for one in weights.values():
        one.keep = log.keep
    return log


def load(run: OpenRun, newest: Path) -> TrainingState:
    """Fill stages and optimizers from a checkpoint and return its state; every rank calls it.

    Raises:
        RunError: on every rank, if a tensor is missing or has another shape, or a rank is late or gone.
    """
    runtime, plan_id = run.runtime, run.job.plan.plan_id
    alike = from_first_rank(sorted(plans_with_the_same_tensors(run.directory, plan_id)))
    return checkpoints.load(
        newest,
        runtime.stages,
        runtime.optimizers,
        runtime.stepped,
        runtime.methods,
        plan_ids={plan_id, *former_ids(run.job.plan), *alike},
        ranks=run.checkpoint_ranks,
        timeout_s=run.job.run.checkpoint.load_timeout_s,
        nodes=run.nodes,
    )


def _open_task(job: PlannedJob, ranks: Attendance, nodes: JobNodes) -> Task:
    """Return the task. Rank 0 prepares the data first, and the other ranks find it in the cache.

    A node with a cache of its own prepares it by its first rank. Ranks wait in the group of `ranks`: a large
    corpus takes longer than the timeout of the job's own group.
    """
    settings = TaskSettings(
        data=job.run.task.data,
        sequence=job.plan.sequence,
        vocabulary=job.problem.model.vocabulary,
        cache=weft_home() / "cache",
        seed=job.run.train.seed,
        image_size=job.problem.model.image_size,
        channels=job.problem.model.channels,
        tokenizer=tokenizer_name(job.run),
        source_block=job.run.task.source_block,
        packing=job.plan.method(PACKING) is not None,
        towers=job.problem.model.towers,
    )
    task: Task | None = None
    last = min(len(nodes.nodes), 2)
    own_turn = 0 if nodes.rank == 0 else 1 if nodes.leads_node else last
    for turn in range(last + 1):
        with together(ranks.group):
            if turn == own_turn:
                task = make_task(job.run.task.kind, settings)
    assert task is not None, "every rank has one of the turns"
    with together(ranks.group):
        require_inputs(job, task)
    return task


def require_inputs(job: PlannedJob, task: Task) -> None:
    """Check that samples have the inputs that a model of the user's own, or a graph that weft knows, reads.

    Raises:
        InputError: if they have fewer or more; for a model of the user's own, also if they have other shapes.
    """
    config, count = job.problem.model, job.problem.job.graph.input_count
    if config.family != FAMILY and not config.is_graph:
        return
    try:
        first = np.zeros(1, dtype=np.int64)
        read = inputs_of(batch_of(task, first, lambda: first)[0])
    except Exception:
        return  # the reader names the sample
    if len(read) != count:
        problem = f"samples have {counted(len(read), 'input')}; {config.name} reads {count}"
        raise InputError(Violation("task.kind", problem))
    if config.family != FAMILY:
        return
    needed = [tuple(shape) for shape in own_model(config.name).sample_shapes[:count]]
    given = [tuple(one.shape[1:]) for one in read]
    if given != needed:
        problem = f"samples have inputs of shapes {_shapes(given)}; {config.name} reads {_shapes(needed)}"
        raise InputError(Violation("task.kind", problem))


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


def _storage(job: PlannedJob, run_dir: Path, rank: int, *, begins: bool) -> RemoteStorage | None:
    """Return the run's storage, if its checkpoints are copied to one; every rank calls it.

    Args:
        begins: copy what a resume reads, too, and bring the history that another directory had.
    """
    directory, storage, url = RunDirectory(run_dir), None, None
    with together():
        if rank == 0:
            # Asked at once, ranks would make several names of a run without one.
            url = directory.storage_url(job.run)
    url = from_first_rank(url)
    with together():
        if url is not None:
            storage = RemoteStorage(url)
            if begins and rank == 0:
                storage.bring_history(run_dir)
                for name in directory.starting_files():
                    storage.put(run_dir / name, name)
    return storage


def _newest_checkpoint(
    job: PlannedJob,
    directory: Path,
    journal: Journal,
    ranks: Attendance,
    nodes: JobNodes,
    storage: RemoteStorage | None,
    *,
    completes: bool,
) -> Path | None:
    timeout_s = job.run.checkpoint.load_timeout_s
    newest, skipped = checkpoints.agree_on_newest(
        directory, ranks, timeout_s=timeout_s, nodes=nodes, completes=completes, storage=storage
    )
    for reason in skipped:
        journal.event("checkpoint skipped", reason=reason)
        print(f"warning: skipped a checkpoint: {reason}", file=sys.stderr)
    return newest


# Ranks with less to compile wait for ranks with stages that compile longer.
TIMEOUT_S = 1800.0


def compile_stages(
    job: PlannedJob, program: RankProgram, stages: Mapping[int, nn.Module], task: Task, device: str
) -> None:
    """Compile the stages in place if the run file says so; every rank calls it and waits for all ranks.

    Raises:
        InputError: if the plan or a layer cannot be compiled.
    """
    if not job.run.train.compile:
        return
    # This imports torch's compiler, which takes a second.
    from weft.run.stage.compiled import compile_stage

    group = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=TIMEOUT_S), group_desc="weft compilation"
    )
    with together(group):
        problems = compile_problems(job.plan, program.columns.kind, job.problem.job.graph)
        if problems:
            raise InputError(problems)
        for index, stage in stages.items():
            compile_stage(
                stage,
                _inputs(job, index, stage, task).to(device),
                dtype=PRECISIONS[job.plan.precision],
                recompute=job.plan.stages[index].recompute,
            )
    dist.destroy_process_group(group)


def _inputs(job: PlannedJob, index: int, stage: nn.Module, task: Task) -> torch.Tensor:
    """Return one micro-batch's input to the stage: samples for the first stage, zeros for the others."""
    plan = job.plan
    if 0 in plan.stages[index].layers:
        return inputs_of(task.batch(np.zeros(plan.size_of(index), dtype=np.int64))[0])[0]
    shape = stage.input_shape(plan.size_of(index), plan.sequence)  # type: ignore[operator]
    return torch.zeros(shape, dtype=PRECISIONS[plan.precision], requires_grad=True)
