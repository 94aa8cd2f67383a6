"""`make_resources`: a rank's lasting objects, made from a plan, a program and the rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from weft.describe.plan import GRADIENT_NORM, PACKING, Plan, Recompute
from weft.describe.synchronisation import keeps_gradients_local
from weft.program.kinds import FORWARD, KINDS
from weft.program.rank_program import RankProgram
from weft.run.methods import Making, MethodState, OwnGradient, states_of
from weft.run.parallel.tensor_stage import (
    SummedGradients,
    connect_stages,
    counted_once,
    summed_gradients,
    tensor_ranks,
)
from weft.run.rank_streams import open_streams, require_queues
from weft.run.stage.borders import Borders, borders_of
from weft.run.stage.roots import StageRoots, stage_roots
from weft.run.stage.stage_module import StageModule, rest
from weft.run.stage.statistics import StageStatistics
from weft.run.stage.taps import StageTaps, stage_taps
from weft.run.state.bucket import FlatLayout, GradientBucket
from weft.run.state.precision import PRECISIONS, STEPPED, lower_precision
from weft.run.state.shards import StageShard
from weft.run.state.states import StageStates, make_states
from weft.run.state.stepped import SteppedWeights, require_elementwise
from weft.run.state.synchroniser_state import REPLICAS, SYNCHRONISER, ReplicaState, SynchroniserState
from weft.run.state.unlike_shards import HeldShards
from weft.run.state.whole_sums import require_counted
from weft.run.streams import Streams
from weft.run.transport.device_messages import ways_of
from weft.run.transport.mesh import Groups, open_groups
from weft.run.transport.transports import RankMessages, transport_of
from weft.sync import get_synchroniser
from weft.sync.base import (
    Gatherer,
    Group,
    Meeting,
    ShapedSynchroniser,
    StatefulSynchroniser,
    Synchroniser,
)
from weft.sync.dense import RoundedDense

# Mean loss of one micro-batch from (output of the last stage, targets). The output is a tensor, or a share of
# the logits if the function declares to take it (`weft.run.parallel.loss_input`); no type states this.
LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]

# Makes the optimizer of one stage; called once per stage of the rank.
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(kw_only=True)
class Resources:
    """The objects that a rank keeps from step to step, shared by the programs it runs. Integer keys are
    stages.

    Attributes:
        layers: the positions of a stage's layers in the model.
        borders, statistics: the values that cross between stages, and those that stages collect in training.
        recompute: the part of a stage that its backward pass runs forward again.
        shards, own_gradients: the stages that the rank shards, and the gradients that it steps.
        methods: the states of methods, by name.
        held_shards: the stages of which a wider replica divides every rank's part into several shards.
        summed: the gradients that a replica's ranks add up before a stage's gradient is complete.
        packed: whether samples hold several documents, of which every stage must know.
        taps, roots: the stages that methods observe, and those with more roots of backward than their
            outputs.
    """

    rank: int
    device: torch.device
    dtype: torch.dtype
    stages: Mapping[int, nn.Module]
    layers: Mapping[int, tuple[int, ...]]
    borders: Mapping[int, Borders]
    statistics: Mapping[int, StageStatistics]
    recompute: Mapping[int, Recompute]
    buckets: Mapping[int, GradientBucket]
    optimizers: Mapping[int, torch.optim.Optimizer]
    shards: Mapping[int, StageShard]
    stepped: Mapping[int, SteppedWeights]
    methods: Mapping[str, MethodState]
    own_gradients: Mapping[int, OwnGradient]
    groups: Groups
    messages: RankMessages
    streams: Streams
    synchroniser: Synchroniser
    loss_function: LossFunction
    seed: int
    packed: bool = False
    held_shards: Mapping[int, HeldShards] = field(default_factory=dict)
    summed: Mapping[int, tuple[SummedGradients, ...]] = field(default_factory=dict)
    taps: Mapping[int, StageTaps] = field(default_factory=dict)
    roots: Mapping[int, StageRoots] = field(default_factory=dict)


def make_resources(
    plan: Plan,
    program: RankProgram,
    stages: Mapping[int, nn.Module],
    loss_fn: LossFunction,
    optimizer_factory: OptimizerFactory,
    *,
    device: torch.device,
    seed: int,
    settings: Mapping[str, Mapping[str, Any]],
    transport: str | None,
    generation: int,
    timeout_s: float,
) -> Resources:
    """Build a rank's resources from the arguments of `RankRuntime`; every rank of the job calls it.

    It opens process groups, makes replicas equal, and lays out weights and gradients for the optimizers.

    Raises:
        InputError: when an optimizer, the synchroniser or a tied weight does not fit the plan, or the
            transport does not fit the device.
    """
    rank = dist.get_rank()
    reduced = plan.reduce_precision
    # Plans refuse another precision with all other synchronisers.
    synchroniser = get_synchroniser(plan.sync) if reduced is None else RoundedDense(PRECISIONS[reduced])
    reducing = groups_of_stages(program, "gather", "reduce")
    crossing = groups_of_stages(program, "reduce_across")
    optimizers = {stage: optimizer_factory(module) for stage, module in stages.items()}
    shared = reducing if plan.sharding != "zero-0" else {}
    divided = [stage for stage, module in stages.items() if tensor_ranks(module).size > 1]
    require_elementwise([optimizers[stage] for stage in shared], f"sharding {plan.sharding!r}")
    require_elementwise([optimizers[stage] for stage in divided], "tensor parallelism", divides_matrices=True)
    require_counted(optimizers.values(), plan, norm=GRADIENT_NORM in program.obligations.methods)
    timeout = timedelta(seconds=timeout_s)
    exchange = transport_of(transport, device)
    if exchange.in_kernels:
        require_queues(program)
    groups = open_groups(plan, program, exchange, generation=generation, timeout=timeout)
    dtype = PRECISIONS[plan.precision]
    for module in stages.values():
        rest(module, dtype)
    connect_stages(plan, rank, stages, groups.replica)
    replicas = {stage: _groups_joining(program, stage) for stage in sorted(stages)}
    unlike = {stage for stage in stages if len(set(plan.replica_degrees[stage])) > 1}
    for stage, over in replicas.items():
        # Unlike replicas have no equal parts to send; each has drawn or read those of the same whole.
        for group in () if stage in unlike else over:
            _equalise(stages[stage], groups.collective[group], program.groups[group][0])
    making = Making(plan=plan, program=program, stages=stages, groups=groups, device=device)
    methods = states_of(making, settings)
    if isinstance(synchroniser, StatefulSynchroniser) and not keeps_gradients_local(plan.sync):
        methods[SYNCHRONISER] = SynchroniserState(synchroniser)
    if isinstance(synchroniser, Gatherer):
        methods[REPLICAS] = ReplicaState()
    layouts = _layouts(program, stages, reducing, crossing, methods)
    states = make_states(
        layouts,
        optimizers,
        {
            stage: Meeting(
                group=groups.collective[group], stage=stage, replica=replica_of(program, stage), seed=seed
            )
            for stage, group in shared.items()
        },
        plan.sharding,
        gatherer=synchroniser if isinstance(synchroniser, Gatherer) else None,
        dtype=dtype,
        stepped_dtype=STEPPED[plan.precision],
    )
    if isinstance(synchroniser, ShapedSynchroniser):
        for stage, bucket in states.buckets.items():
            synchroniser.lay_out(stage, bucket.places)
    for module in stages.values():
        lower_precision(module.parameters(), dtype)
    resources = Resources(
        rank=rank,
        device=device,
        dtype=dtype,
        stages=stages,
        layers={stage: plan.stages[stage].layers for stage in stages},
        borders={
            stage: borders_of(plan, stage, replica_of(program, stage), module, *_neighbours(program, stage))
            for stage, module in stages.items()
        },
        recompute={index: plan.stages[index].recompute for index in stages},
        statistics={
            stage: StageStatistics(
                module, share_of(program, stage), [groups.collective[group] for group in replicas[stage]]
            )
            for stage, module in stages.items()
        },
        buckets=states.buckets,
        optimizers=optimizers,
        shards=states.shards,
        stepped=states.stepped,
        methods=methods,
        own_gradients=_own_gradients(stages, layouts, states, methods, program, groups, unlike),
        groups=groups,
        messages=exchange.open_messages(ways_of(program), groups.name, timeout),
        streams=open_streams(device, exchanges_in_kernels=exchange.in_kernels),
        synchroniser=synchroniser,
        loss_function=loss_fn,
        seed=seed,
        packed=plan.method(PACKING) is not None,
        held_shards=_held_shards(plan, stages, states, unlike),
        summed=summed_gradients(
            stages, layouts, {stage: bucket.flat for stage, bucket in states.buckets.items()}
        ),
    )
    for one in methods.values():
        one.begin(resources)
    resources.taps = stage_taps(
        stages,
        {stage: layers[0] for stage, layers in resources.layers.items()},
        lambda stage: [tap for one in methods.values() for tap in one.taps(stage)],
    )
    resources.roots = stage_roots(
        resources.layers, lambda stage: [root for one in methods.values() for root in one.roots(stage)]
    )
    return resources


def groups_of_stages(program: RankProgram, *names: str) -> dict[int, int]:
    """Return, by stage, the number of the largest group over which the rank runs these kinds."""
    columns = program.columns
    rows = np.isin(columns.kind, [KINDS.code(name) for name in names])
    pairs = zip(columns.stage[rows].tolist(), columns.group[rows].tolist(), strict=True)
    return dict(sorted(pairs, key=lambda pair: len(program.groups.get(pair[1], ()))))


def _groups_joining(program: RankProgram, stage: int) -> list[int]:
    """Return the sorted groups in which the rank meets others that have the same weights of the stage.

    Groups of a part of another group are left out.
    """
    columns = program.columns
    rows = np.array([kind.joins_replicas for kind in KINDS])[columns.kind] & (columns.stage == stage)
    members: dict[frozenset[int], int] = {}
    for group in np.unique(columns.group[rows]).tolist():
        members.setdefault(frozenset(program.groups[group]), group)
    return [group for ranks, group in members.items() if not any(ranks < others for others in members)]


def share_of(program: RankProgram, stage: int) -> float:
    """Return the share of a step's micro-batches that the rank runs forward through one of its stages."""
    columns = program.columns
    own = (columns.kind == FORWARD) & (columns.stage == stage)
    return len(np.unique(columns.micro_batch[own])) / (
        program.micro_batches * program.obligations.split(stage)
    )


def taken_share(program: RankProgram, stage: int) -> float:
    """Return the share of a cycle's steps in which the rank runs one of its stages."""
    columns = program.columns
    own = (columns.kind == FORWARD) & (columns.stage == stage)
    return len(np.unique(columns.iteration[own])) / program.steps_per_cycle


def replica_of(program: RankProgram, stage: int) -> int:
    """Return the replica of one of the rank's stages."""
    columns = program.columns
    return int(columns.replica[(columns.kind == FORWARD) & (columns.stage == stage)][0])


def _neighbours(program: RankProgram, stage: int) -> tuple[list[int], list[int]]:
    """Return the stages that produce the stage's inputs, and the stages that read its output, sorted."""
    edges = sorted(program.obligations.stage_edges)
    return [producer for producer, consumer in edges if consumer == stage], [
        consumer for producer, consumer in edges if producer == stage
    ]


def gradient_weight(plan: Plan, program: RankProgram, stage: int) -> float:
    """Return the factor of a stage's losses in the gradient, on top of their weight in the global mean.

    It is one over the replica's share of the losses if the replica steps with its own mean alone.
    """
    return 1.0 / share_of(program, stage) if keeps_gradients_local(plan.sync) else 1.0


def _equalise(module: nn.Module, group: Group, source: int) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        group.broadcast(tensor.detach(), source)


def _layouts(
    program: RankProgram,
    stages: Mapping[int, nn.Module],
    reducing: Mapping[int, int],
    crossing: Mapping[int, int],
    methods: Mapping[str, MethodState],
) -> dict[int, FlatLayout]:
    """Return the flat layouts of the stages' parameters, with one shard per rank that reduces the gradient.

    Each shard has as many equal parts as ranks that hold the shard and add it up.
    """

    def ranks(groups: Mapping[int, int], stage: int) -> int:
        return len(program.groups[groups[stage]]) if stage in groups else 1

    return {
        stage: FlatLayout.of(
            module,
            ranks(reducing, stage),
            apart=(parameter for one in methods.values() for parameter in one.apart(stage)),
            parts=ranks(crossing, stage),
        )
        for stage, module in stages.items()
    }


def _held_shards(
    plan: Plan, stages: Mapping[int, nn.Module], states: StageStates, unlike: Collection[int]
) -> dict[int, HeldShards]:
    """Return the shards of the stages that a wider replica of them divides over more ranks."""
    found = {}
    for stage in unlike:
        module, degree = stages[stage], plan.tensor_degrees[stage]
        assert isinstance(module, StageModule), "plans refuse tensor ranks for other stages"
        if module.tensor.size < degree:
            found[stage] = HeldShards(module, states.buckets[stage], degree)
    return found


def _own_gradients(
    stages: Mapping[int, nn.Module],
    layouts: Mapping[int, FlatLayout],
    states: StageStates,
    methods: Mapping[str, MethodState],
    program: RankProgram,
    groups: Groups,
    unlike: Collection[int],
) -> dict[int, OwnGradient]:
    """Return, by stage, the gradients that this rank steps, and those that it counts for all ranks.

    The first tensor rank counts elements that all hold; ranks with the same shard count an equal part each.
    Of unlike replicas, whose ranks hold unlike parts, the first one counts all.
    """
    reducing = groups_of_stages(program, "gather", "reduce")
    crossing, found = groups_of_stages(program, "reduce_across"), {}
    for stage, layout in layouts.items():
        others = [one.own_gradient(stage) for one in methods.values()]
        copies = {id(copy) for one in methods.values() for copy in one.counted_elsewhere(stage)}
        group = reducing.get(stage)
        own = layout.share(0 if group is None else groups.collective[group].place)
        counts = _part(own, groups.collective[crossing[stage]]) if stage in crossing else own
        if stage in unlike:
            counts = slice(0, 0 if replica_of(program, stage) else layout.length)
        if stage in states.shards:
            stepped = states.shards[stage].own_gradient
            counted = stepped[counts.start - own.start : counts.stop - own.start]
        else:
            stepped = states.buckets[stage].flat
            counted = stepped[counts]
        once = counted_once(stages[stage], layout, counted, counts.start, copies)
        found[stage] = OwnGradient(
            (stepped, *(flat for one in others for flat in one.stepped)),
            (*once, *(flat for one in others for flat in one.counted)),
        )
    return found


def _part(of: slice, group: Group) -> slice:
    """Return this rank's part of a slice that the ranks of a group cut in equal parts."""
    size = (of.stop - of.start) // group.size
    start = of.start + group.place * size
    return slice(start, start + size)
