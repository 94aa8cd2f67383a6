"""`RankRuntime`: executes a plan's Program step by step on one rank, for `weft train` or a user's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from weft.describe.plan import GRADIENT_NORM, Plan
from weft.describe.synchronisation import keeps_gradients_local, micro_batches_of_steps
from weft.errors import InputError, RunError, Violation
from weft.planning.planned_job import PlannedJob
from weft.program.buffers import last_gradients
from weft.program.rank_program import RankProgram
from weft.run.executor import Executor, Outcome, require_supported
from weft.run.launch.flight_recorder import write_record
from weft.run.methods import MethodState
from weft.run.parallel.tensor_stage import disconnect_stages
from weft.run.record.recorder import Recorder
from weft.run.resources import LossFunction, OptimizerFactory, Resources, gradient_weight, make_resources
from weft.run.stage.borders import require_plain
from weft.run.stage.segments import stage_runs
from weft.run.stage.statistics import average_statistics
from weft.run.state.bucket import GradientBucket
from weft.run.state.shards import StageShard, gather_weights
from weft.run.state.stepped import SteppedWeights
from weft.run.step_result import Numbers, StepResult, named_step
from weft.run.streams import Completion, Value
from weft.run.supported import unsupported
from weft.run.transport.device_group import DeviceGroup, abort
from weft.run.transport.failure_detector import FailureDetector
from weft.run.transport.gone import Gone
from weft.run.workspace import Batch, Route, Workspace

TIMEOUT_S = 1800.0


class RankRuntime:
    """One rank of a running plan.

    Every rank of the job's default process group makes one. All give the same plan; each gives its own part
    of the program.

    Args:
        plan, program: the plan, and this rank's part of the training program compiled from it
            (`weft.planning.compile.compile_part`, or `weft.program.rank_program.part_of` a whole program).
        stages: this rank's stages by number, on `device`. Each is a
            `weft.run.stage.stage_module.RunnableStage` in the precision that its optimizer steps
            (`weft.run.state.precision.STEPPED`). The runtime converts its parameters to the plan's precision.
            Replicas begin with the values of their group's first rank.
        loss_fn: (output of the last stage, targets) to the mean loss of the micro-batch.
        optimizer_factory: makes the optimizer of one stage. It must not replace `.grad`. Where replicas shard
            its states, it must be one of `weft.run.state.stepped.ELEMENTWISE` or a
            `weft.run.state.whole_sums.WholeSumsOptimizer`.
        device: where the stages compute.
        transport: the way of messages and sums, `host` or `device` (`weft.run.transport.transports`); None
            chooses by the device.
        seed: keys the numbers that modules draw while they train (dropout).
        clip_norm: the largest norm of the whole gradient to step with; None steps with any.
        skip_non_finite: leave out a step whose gradient is not finite, instead of failing. This and
            `clip_norm` need a plan with the method `gradient-norm`.
        recorder: records the measured times; None records nothing.
        flight_record: the file of torch's flight recorder, written if another rank is gone; None writes none.
        generation: counts the runtimes of one job.
        timeout_s: seconds that a rank waits for another one before it gives up.
        name_of: names a rank in errors, such as with its host.

    Attributes:
        others: groups of the caller whose calls under way end, too, if another rank is gone.

    Raises:
        InputError: when the runtime cannot execute the program, or plan, stages and ranks do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        program: RankProgram,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFunction,
        optimizer_factory: OptimizerFactory,
        *,
        device: torch.device | str,
        seed: int,
        clip_norm: float | None = None,
        skip_non_finite: bool = False,
        recorder: Recorder | None = None,
        flight_record: Path | None = None,
        transport: str | None = None,
        generation: int = 0,
        timeout_s: float = TIMEOUT_S,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.rank = dist.get_rank()
        require_runnable(plan, program)
        if (clip_norm is not None or skip_non_finite) and not plan.method(GRADIENT_NORM):
            problem = "clip_norm and skip_non_finite need a plan with the method"
            raise InputError(Violation("runtime", problem, GRADIENT_NORM))
        _require_own(program, self.rank, stages)
        self.plan = plan
        self.program = program
        self._stages = stages
        self._held: Resources | None = make_resources(
            plan,
            program,
            stages,
            loss_fn,
            optimizer_factory,
            device=torch.device(device),
            seed=seed,
            settings={"gradient-norm": {"clip_norm": clip_norm, "skip_non_finite": skip_non_finite}},
            transport=transport,
            generation=generation,
            timeout_s=timeout_s,
        )
        self._training: Executor | None = Executor(
            program, self._workspace(program, training=True), recorder=recorder
        )
        self._gone, self._flight_record = Gone(name_of), flight_record
        # Named here: torch forgets a group's ranks when another thread destroys it.
        self.others = [DeviceGroup(dist.group.WORLD)] if dist.group.WORLD else []
        self._detector = FailureDetector(WeakMethod(self._abort), self._held.groups.losses, timeout_s)

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """This rank's modules by stage; their parameters have the model's own names.

        Call `gather_weights` before you read parameters that replicas shard, or running statistics.
        """
        return self._stages

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """This rank's optimizers by stage; a learning rate may be set between two steps."""
        return self._resources.optimizers

    @property
    def buckets(self) -> Mapping[int, GradientBucket]:
        """This rank's flat gradients by stage; clear after every step unless replicas shard the stage."""
        return self._resources.buckets

    @property
    def shards(self) -> Mapping[int, StageShard]:
        """The stages with weights or states that this rank shards with other replicas."""
        return self._resources.shards

    @property
    def stepped(self) -> Mapping[int, SteppedWeights]:
        """The stages with optimizers that step a shard, or master copies of the parameters."""
        return self._resources.stepped

    @property
    def reading_stages(self) -> frozenset[int]:
        """This rank's stages that read data of micro-batches although they are neither first nor last."""
        if self._resources.packed:
            return frozenset(self.stages)
        return frozenset(stage for stage, roots in self._resources.roots.items() if roots.reads_targets)

    @property
    def methods(self) -> Mapping[str, MethodState]:
        """The states of methods on this rank, by name."""
        return self._resources.methods

    def notice(self) -> int:
        """Record the times of instructions that have ended; any thread may call it.

        Returns:
            The bound of the error of a device's times so far, in nanoseconds; 0 if the host measures.
        """
        held = self._held
        return 0 if held is None else held.streams.notice()

    def gather_weights(self) -> None:
        """Bring the parameters and statistics of `stages` up to date; every rank must call it."""
        self.catch_up()
        gather_weights(self.shards)
        self.average_statistics()

    def copy(self, work: Callable[[], None], *reads: Value[Any]) -> Completion:
        """Begin work that copies weights and optimizer states, as they are between two steps.

        On an accelerator the passes of the next step run beside it; optimizers step after it.
        """
        if self._training is None:
            raise RunError("this runtime is closed")
        self._training.drain()
        copied = self._resources.streams.copying.run("checkpoint", work, *reads)
        self._training.step_after(copied)
        return copied

    def move_weights(self, done: int, job: PlannedJob) -> list[Mapping[str, Any]]:
        """Let methods move weights between ranks after a step; every rank must call it.

        Args:
            done: the number of steps that are done.

        Returns:
            The events that methods tell.
        """
        found = []
        for method in self.methods.values():
            if method.moves_after(done):
                self.catch_up()
                found.append(method.move(done, job))
        return [one for one in found if one is not None]

    def average_statistics(self) -> None:
        """Average running statistics, such as batch norms', over replicas; every rank must call it."""
        self.catch_up()
        average_statistics(self._resources.statistics)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Enter a block where the parameters of `stages` stand for all replicas, even if each steps by
        itself. Every rank must enter it, and take no step in it."""
        self.catch_up()
        with ExitStack() as held:
            for one in self.methods.values():
                held.enter_context(one.settled())
            yield

    def step(self, step: int, batch: Batch) -> StepResult:
        """Train one step.

        Args:
            step: counts from 0 over the whole job, resumed runs included.
            batch: maps a micro-batch's number in the global batch to (inputs, targets), each with
                `micro_batch_size` samples. It is called only for data that this rank's stages read.

        Raises:
            RunError: names the instruction that failed.
        """
        if self._training is None:
            raise RunError("this runtime is closed")
        with self._gone.named():
            outcome = self._training.run_step(step, batch)
        return self._share(step, outcome)

    def _abort(self, gone: int) -> None:
        """End all communication of this rank because another one is gone; the detector's thread calls it.

        Whatever waits for another rank fails with a `PeerLostError`, and so does the step under way. A kernel
        of NCCL that waits for a rank that is gone ends in no other way.
        """
        if self._flight_record is not None:
            write_record(self._flight_record)
        self._gone.add(gone)
        held = self._held
        if held is not None:
            held.messages.hang_up()
            abort([*held.groups.all, *held.messages.groups, *self.others])

    def evaluate(self, program: RankProgram, batches: Iterable[Batch]) -> float:
        """Return the mean loss over batches, computed by this rank's part of a forward-only program.

        Every rank must call it with the same number of batches.

        Raises:
            InputError: when the runtime cannot execute the program, or there are no batches.
            RunError: names the instruction that failed.
        """
        executor = Executor(program, self._workspace(program, training=False))
        self.average_statistics()
        with self.settled(), self._gone.named():
            for module in self.stages.values():
                module.eval()
            try:
                results = [
                    self._share(step, executor.run_step(step, batch)) for step, batch in enumerate(batches)
                ]
                executor.drain()
            finally:
                for module in self.stages.values():
                    module.train()
        if not results:
            raise InputError(Violation("evaluate", "no batches were given"))
        return sum(result.loss for result in results) / len(results)

    def close(self, *, failed: bool = False) -> None:
        """Finish the work under way and release threads and process groups; the stages stay.

        If it failed, the other ranks are told that this one is gone.
        """
        if self._held is None or self._training is None:
            return
        drained = False
        try:
            self._training.drain()
            drained = True
        finally:
            self._detector.close(farewell=drained and not failed)
            self._held.streams.close()
            self._held.messages.close()
            self._held.groups.close()
            disconnect_stages(self._stages)
            for taps in self._held.taps.values():
                taps.close()
            # A group's torch threads end with the last reference to it. A thread that outlives the
            # interpreter and then frees a tensor aborts the process.
            self._training = self._held = None
            self.others.clear()

    @property
    def _resources(self) -> Resources:
        if self._held is None:
            raise RunError("this runtime is closed")
        return self._held

    def _workspace(self, program: RankProgram, *, training: bool) -> Workspace:
        last = last_gradients(program.columns, range(len(program)))
        last_stage = len(self.plan.stages) - 1
        return Workspace(
            resources=self._resources,
            route=Route.of(program),
            training=training,
            micro_batch_weight=1.0 / program.micro_batches,
            gradient_weight=gradient_weight(self.plan, self.program, last_stage)
            if last_stage in self._stages
            else 1.0,
            step_shares=tuple(len(one) / program.micro_batches for one in micro_batches_of_steps(self.plan))
            if training
            else (1.0,),
            segments=stage_runs(program, self._resources),
            last_gradients=frozenset(program.first_row + row for row in last),
        )

    def catch_up(self) -> None:
        """Wait between two steps until all streams have done what the host reads now."""
        if self._training is not None:
            self._training.drain()

    def _share(self, step: int, outcome: Outcome) -> StepResult:
        numbers, group, methods = Numbers(), self._resources.groups.losses, self.methods.values()
        reading = self._resources.streams.reading
        with named_step(step):
            read = reading.run("results", lambda: numbers.read(outcome, group, methods), *outcome.numbers)
        return StepResult(
            step,
            numbers,
            read,
            outcome.series,
            tuple(outcome.shares),
            gone=self._gone,
            independent=keeps_gradients_local(self.plan.sync),
        )


def require_runnable(plan: Plan, program: RankProgram) -> None:
    """Refuse a plan or program that this runtime cannot execute; call it before any process group starts.

    Raises:
        InputError: with one line for each unsupported thing.
    """
    problems = unsupported(plan)
    try:
        require_supported(program)
    except InputError as error:
        problems.extend(error.violations)
    if problems:
        raise InputError(problems)


def _require_own(program: RankProgram, rank: int, stages: Mapping[int, nn.Module]) -> None:
    if program.rank != rank:
        problem = f"rank {rank} was given the part of rank {program.rank}"
        raise InputError(Violation("runtime", problem, f"that of rank {rank}"))
    if sorted(stages) != list(program.stages):
        owned = list(program.stages)
        problem = f"rank {rank} was given the stages {sorted(stages)}, the program gives it {owned}"
        raise InputError(Violation("runtime", problem))
    require_plain(stages, program.obligations.stage_edges)
