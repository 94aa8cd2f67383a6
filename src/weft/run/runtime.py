"""`Runtime`: executes a plan's Program step by step on this rank, under `weft train` or a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.program.buffers import SHARDED_BUFFERS
from weft.program.kinds import REDUCE, REDUCE_TIED
from weft.program.program import Program
from weft.run.bucket import FlatLayout, GradientBucket, make_buckets
from weft.run.channels import Channels, WorkQueue
from weft.run.executor import Executor, require_supported
from weft.run.handlers import TAGS
from weft.run.mesh import Groups, open_groups
from weft.run.recorder import Recorder
from weft.run.shards import StageShard, gather_weights, require_elementwise
from weft.run.supported import unsupported
from weft.run.tied import TiedGradient, copies_of
from weft.run.workspace import Batch, LossFunction, Resources, Route, Workspace
from weft.sync import get_synchroniser

TIMEOUT_S = 1800.0
PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64}

# Makes the optimizer of one stage; asked once per stage of the rank.
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


class StepResult:
    """What a step gave. The loss is shared by all ranks; reading it waits for the slowest of them."""

    def __init__(self, step: int, shares: list[torch.Tensor], work: dist.Work | None) -> None:
        self.step = step
        self._shares = shares
        self._work = work

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the global batch."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        # In the order of the ranks, so that all ranks and all repetitions read the same bits.
        return sum(share.item() for share in self._shares)


class Runtime:
    """One rank of a running plan.

    Every rank of the job's default process group makes one, with the same plan and program.

    Args:
        plan, program: the plan and the training program compiled from it.
        stages: this rank's stages by number, on `device`, each a `weft.run.stage_module.Stage`. Replicas
            begin with the values of their group's first rank.
        loss_fn: (output of the last stage, targets) to the mean loss of the micro-batch.
        optimizer_factory: makes the optimizer of one stage. It must not replace `.grad`. Where replicas
            share its states out, it must be one of `weft.run.shards.ELEMENTWISE`.
        device: where the stages compute; messages and sums go through host memory.
        seed: keys the numbers that modules draw while they train (dropout).
        recorder: where measured times go; None keeps none.
        generation: counts the runtimes of one job.
        timeout_s: how long a rank waits for another one before it gives up.

    Raises:
        InputError: when the runtime cannot execute the program, or plan, stages and ranks do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFunction,
        optimizer_factory: OptimizerFactory,
        *,
        device: torch.device | str,
        seed: int,
        recorder: Recorder | None = None,
        generation: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        rank = dist.get_rank()
        require_runnable(plan, program)
        _require_stages(program, rank, stages)
        synchroniser = get_synchroniser(plan.sync)
        reducing = _reducing_groups(program, rank)
        optimizers = {stage: optimizer_factory(module) for stage, module in stages.items()}
        shared = reducing if plan.sharding != "zero-0" else {}
        require_elementwise([optimizers[stage] for stage in shared], plan.sharding)
        self.plan = plan
        self.program = program
        groups = open_groups(program, rank, generation=generation, timeout=timedelta(seconds=timeout_s))
        for stage, group in reducing.items():
            _equalise(stages[stage], groups.collective[group], program.groups[group][0])
        tied = _tied_gradients(program, groups, stages)
        layouts = {
            stage: FlatLayout.of(
                module,
                len(program.groups[reducing[stage]]) if stage in reducing else 1,
                apart=(one.copies[stage] for one in tied.values() if stage in one.copies),
            )
            for stage, module in stages.items()
        }
        apart = plan.sharding == "zero-2" and bool(shared)
        buckets = make_buckets(layouts, SHARDED_BUFFERS if apart else len(stages))
        self._resources = Resources(
            rank=rank,
            device=torch.device(device),
            dtype=PRECISIONS[plan.precision],
            stages=stages,
            buckets=buckets,
            optimizers=optimizers,
            shards={
                stage: StageShard(
                    layouts[stage],
                    buckets[stage],
                    optimizers[stage],
                    groups.collective[group],
                    apart=apart,
                )
                for stage, group in shared.items()
            },
            tied=tied,
            groups=groups,
            channels=Channels(groups.messages, TAGS),
            collectives=WorkQueue("reduction"),
            synchroniser=synchroniser,
            loss_function=loss_fn,
            micro_batch_size=plan.micro_batch_size,
            sequence=plan.sequence,
            seed=seed,
            recomputing=frozenset(
                index for index, stage in enumerate(plan.stages) if stage.recompute == "full"
            ),
        )
        self._training = Executor(program, self._workspace(program, training=True), recorder=recorder)

    @property
    def rank(self) -> int:
        return self._resources.rank

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """This rank's modules by stage; their parameters' names are the model's own.

        Where replicas share out what they step, `gather_weights` comes before anyone reads the parameters.
        """
        return self._resources.stages

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """This rank's optimizers by stage; a learning rate may be set between two steps."""
        return self._resources.optimizers

    @property
    def buckets(self) -> Mapping[int, GradientBucket]:
        """This rank's flat gradients by stage; clear after every step where replicas share nothing out."""
        return self._resources.buckets

    @property
    def shards(self) -> Mapping[int, StageShard]:
        """The stages that this rank steps a share of only."""
        return self._resources.shards

    def gather_weights(self) -> None:
        """Bring the parameters of `stages` up to date; every rank must call it."""
        gather_weights(self.shards)

    def step(self, step: int, batch: Batch) -> StepResult:
        """Train one step.

        Args:
            step: counts from 0 over the whole job, resumed runs included.
            batch: micro-batch number within the global batch to (inputs, targets), each with
                `micro_batch_size` samples. Called only for what this rank's first and last stages need.

        Raises:
            RunError: naming the instruction that failed.
        """
        return self._share(step, self._training.run_step(step, batch))

    def evaluate(self, program: Program, batches: Iterable[Batch]) -> float:
        """Mean loss over batches, by a forward-only program; every rank must call it with as many batches.

        Raises:
            InputError: when the runtime cannot execute the program.
            RunError: naming the instruction that failed.
        """
        executor = Executor(program, self._workspace(program, training=False))
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

    def close(self) -> None:
        """Finish what is under way and give threads and process groups back."""
        try:
            self._training.drain()
        finally:
            self._resources.channels.close()
            self._resources.collectives.close()
            self._resources.groups.close()

    def _workspace(self, program: Program, *, training: bool) -> Workspace:
        micro_batches = len(set(program.obligations.forward[:, 2].tolist()))
        return Workspace(
            resources=self._resources,
            route=Route.of(program, self.rank),
            training=training,
            micro_batch_weight=1.0 / micro_batches,
        )

    def _share(self, step: int, loss: float) -> StepResult:
        share = torch.tensor([loss], dtype=torch.float64)
        shares = [torch.empty_like(share) for _ in range(self.program.ranks)]
        work = dist.all_gather(shares, share, group=self._resources.groups.losses, async_op=True)
        return StepResult(step, shares, work)


def require_runnable(plan: Plan, program: Program) -> None:
    """Refuse a plan or program that this runtime cannot execute; call it before any process group starts.

    Raises:
        InputError: one line for everything that is not supported yet.
    """
    problems = unsupported(plan)
    if plan.precision not in PRECISIONS:
        problem = f"precision {plan.precision!r} is not supported by this runtime yet"
        problems.append(Violation("plan", problem, "fp32"))
    try:
        require_supported(program)
    except InputError as error:
        problems.extend(error.violations)
    if problems:
        raise InputError(problems)


def _require_stages(program: Program, rank: int, stages: Mapping[int, nn.Module]) -> None:
    owned = sorted({stage for (stage, _), ranks in program.obligations.owners.items() if rank in ranks})
    if sorted(stages) != owned:
        problem = f"rank {rank} was given the stages {sorted(stages)}, the program gives it {owned}"
        raise InputError(Violation("runtime", problem))


def _reducing_groups(program: Program, rank: int) -> dict[int, int]:
    """Group index by stage, for the stages that this rank shares with other replicas."""
    columns = program.columns
    rows = (columns.kind == REDUCE) & (columns.rank == rank)
    pairs = zip(columns.stage[rows], columns.group[rows], strict=True)
    return {int(stage): int(group) for stage, group in pairs}


def _tied_gradients(
    program: Program, groups: Groups, stages: Mapping[int, nn.Module]
) -> dict[int, TiedGradient]:
    """By the part of their reductions, the weights that stages of this rank share, all copies made equal."""
    columns = program.columns
    tied = {}
    for row in np.flatnonzero((columns.kind == REDUCE_TIED) & (columns.rank == groups.rank)).tolist():
        part, group = int(columns.part[row]), int(columns.group[row])
        members = program.groups[group]
        copies = copies_of(program.obligations.tied, part, stages)
        tied[part] = TiedGradient(copies, len(members))
        tied[part].equalise(groups.collective[group], members[0])
    return tied


def _equalise(module: nn.Module, group: dist.ProcessGroup, source: int) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        on_host = tensor.detach().to("cpu").contiguous()
        dist.broadcast(on_host, source, group=group)
        tensor.detach().copy_(on_host)
