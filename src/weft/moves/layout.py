"""From a `Layout` to a Plan: `build_plan` makes stages, ranks and shares.

`refuse` returns the reason why a layout cannot run a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from weft.describe.amount import Shape
from weft.describe.job import Job
from weft.describe.layout import KEPT_IN_PLANS, Layout
from weft.describe.layout_text import order_text
from weft.describe.loss_choice import loss_choices
from weft.describe.plan import AXES, SERVERS, Choice, Plan, Recompute, Replica, Stage
from weft.describe.servers import refuse_servers
from weft.describe.synchronisation import derived_options
from weft.describe.units import counted
from weft.errors import InputError, Violation, nearest_divisor
from weft.moves.composition import refuse_composition
from weft.moves.partition import balanced_partition
from weft.program.arrays import Ints
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements

# Axes that a mesh names even if they have one rank.
_ALWAYS = ("pp", "dp")


def flops_per_layer(job: Job) -> list[float]:
    """Return every layer's flops for one sample: the weights that balance stages without measurements."""
    shape = Shape(1, job.sequence)
    return [layer.flops(shape) for layer in job.graph.layers]


def shares_of(job: Job, layout: Layout) -> tuple[int, ...]:
    """Return the micro-batches per step of each of the layout's `dp` pipelines."""
    return layout.micro_batches_per_replica or _different_shares(job, layout) * layout.dp


def _different_shares(job: Job, layout: Layout) -> tuple[int, ...]:
    """Return each number of micro-batches in `shares_of` once; there may be thousands of equal pipelines."""
    if layout.micro_batches_per_replica is not None:
        return tuple(dict.fromkeys(layout.micro_batches_per_replica))
    return (job.global_batch // (layout.dp * layout.micro_batch_size),)


def pipeline_of(job: Job, layout: Layout) -> Pipeline:
    """Return the abstract pipeline of the replica with the most micro-batches."""
    return Pipeline(layout.pp, layout.stages, max(_different_shares(job, layout)))


def parts_of(layout: Layout, layer_seconds: Sequence[float]) -> list[list[int]]:
    """Return positions of each stage's layers, balanced by `layer_seconds` unless the layout has cuts.

    Raises:
        InputError: when there are fewer layers than stages.
    """
    if layout.layers_per_stage is None:
        return balanced_partition(layer_seconds, layout.stages)
    cuts = accumulate(layout.layers_per_stage, initial=0)
    return [list(range(first, last)) for first, last in pairwise(cuts)]


def refuse(job: Job, layout: Layout) -> str | None:
    """Return the reason why this layout cannot run this job (given, allowed, nearest), or None."""
    if layout.ranks > job.cluster.ranks:
        axes = " x ".join(_mesh(layout))
        return f"{axes} = {counted(layout.ranks, 'rank')}, the cluster has {job.cluster.ranks}"
    servers = int({**job.sync_options, **layout.sync_options}.get(SERVERS, 0))
    if (misplaced := refuse_servers(layout.ranks, servers, job.cluster)) is not None:
        return misplaced
    layers = len(job.graph.layers)
    if layout.stages > layers:
        spread = f"the model has {counted(layers, 'layer')} to spread"
        return f"pp x loops = {layout.stages} stages, {spread}"
    if (unshared := _refuse_shared(job, layout)) is not None:
        return unshared
    if (apart := refuse_composition(job, layout)) is not None:
        return apart
    if (refused_share := _refuse_share(job, layout)) is not None:
        return refused_share
    return job.graph.refuse_grid(layout.grid, job.sequence) or _refuse_order_of_any(job, layout)


def _refuse_shared(job: Job, layout: Layout) -> str | None:
    """Return the reason why the layout cannot divide the batch, the layers or the devices, or None."""
    batch, size, given = job.global_batch, layout.micro_batch_size, layout.micro_batches_per_replica
    if given is None:
        reason = refuse_batch(batch, layout.dp, size)
    else:
        reason = refuse_shares(given, batch, layout.dp, size)
    if reason is None and layout.layers_per_stage is not None:
        reason = refuse_layers(layout.layers_per_stage, layout.stages, len(job.graph.layers))
    if reason is None and layout.recompute_per_stage is not None:
        reason = refuse_recomputes(layout.recompute_per_stage, layout.stages)
    if reason is None and layout.splits:
        reason = refuse_splits(layout.splits, layout.stages, size)
    if reason is None and layout.rank_order is not None:
        reason = refuse_order(layout.rank_order, layout.ranks, layout.width)
    return reason


def _refuse_share(job: Job, layout: Layout) -> str | None:
    """Return the reason why ranks cannot step one shard of a parameter each, or None."""
    reason = "the optimizer is not known to step every element by itself"
    if layout.sharding != "zero-0" and not job.optimizer.steps_shards:
        return f"{layout.sharding} shares out what is stepped, and {reason}; nearest sharding: zero-0"
    if layout.tp > 1 and not job.optimizer.divides_matrices:
        return f"tensor ranks step a share of every matrix, and {reason}; nearest tp: 1"
    return None


def _refuse_order_of_any(job: Job, layout: Layout) -> str | None:
    """Return the reason why the schedule cannot run the pipeline of one of the replicas, or None."""
    schedule = get_schedule(layout.schedule)
    for share in _different_shares(job, layout):
        pipeline = Pipeline(layout.pp, layout.stages, share)
        reason = schedule.refuse(pipeline, layout.options)
        if reason is not None:
            return reason
    return None


def build_plan(job: Job, layout: Layout, layer_seconds: Sequence[float]) -> Plan:
    """Build the Plan of a layout with contiguous stages.

    `layer_seconds` (one weight per layer) balances the stages unless the layout has cuts. Tensor- and
    context-parallel axes are innermost in the numbering of ranks, as their ranks communicate in every layer.
    The replicas of a stage come next, as their gradients are large.

    Raises:
        InputError: when the layout cannot run the job.
    """
    reason = refuse(job, layout)
    if reason is not None:
        raise InputError(Violation(str(layout), reason))
    stages, options = _stages_of(job, layout, layer_seconds), {**job.sync_options, **layout.sync_options}
    sync = Choice(name=layout.sync, options=options)
    return Plan(
        model=job.graph.name,
        model_fingerprint=job.graph.fingerprint,
        cluster=job.cluster.name,
        cluster_fingerprint=job.cluster.fingerprint,
        sequence=job.sequence,
        global_batch=job.global_batch,
        precision=job.precision,  # type: ignore[arg-type]  # pydantic refuses what the literal does not name
        reduce_precision=job.reduce_precision,  # type: ignore[arg-type]  # see above
        mesh=_mesh(layout),
        stages=stages,
        schedule=Choice(name=layout.schedule, options=dict(layout.options)),
        methods=layout.methods_beside(job.methods),
        layer_choices=(*job.layer_choices, *loss_choices(layout, len(job.graph.layers) - 1)),
        optimizer=job.optimizer,
        launch=job.launch,
        sync=Choice(name=layout.sync, options={**options, **derived_options(sync, stages, job.cluster)}),
        **{name: getattr(layout, name) for name in KEPT_IN_PLANS},
    )


def _stages_of(job: Job, layout: Layout, layer_seconds: Sequence[float]) -> tuple[Stage, ...]:
    placement = placements(get_schedule(layout.schedule), pipeline_of(job, layout))
    parts = parts_of(layout, layer_seconds)
    shares = shares_of(job, layout)
    mesh = layout.pp, layout.dp, layout.width
    columns = [tuple(devices) for devices in placement.T.tolist()]
    # The stages of a device have the same replicas.
    replicas = {
        devices: _replicas(mesh, layout.rank_order, devices, shares) for devices in dict.fromkeys(columns)
    }
    each = zip(parts, layout.recomputes, layout.splits or (1,) * len(parts), columns, strict=True)
    return tuple(
        Stage(layers=tuple(layers), replicas=replicas[devices], recompute=recompute, splits=splits)
        for layers, recompute, splits, devices in each
    )


# A search makes many plans of few meshes; their replicas, thousands on a large cluster, are the same.
@lru_cache(maxsize=16)
def _replicas(
    mesh: tuple[int, int, int],
    rank_order: tuple[int, ...] | None,
    devices: tuple[int, ...],
    shares: tuple[int, ...],
) -> tuple[Replica, ...]:
    """Return the replicas of a stage on these devices of each pipeline; `mesh` is (pp, dp, width)."""
    ranks = rank_table(mesh, rank_order)[list(devices)].swapaxes(0, 1).tolist()
    return tuple(
        Replica(ranks=tuple(held), micro_batches=share // len(devices))
        for share, copies in zip(shares, ranks, strict=True)
        for held in copies
    )


def _mesh(layout: Layout) -> dict[str, int]:
    """Return the sizes of the axes; axes inside a replica of a stage only if they have several ranks."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    return {axis: size for axis, size in sizes.items() if axis in _ALWAYS or size > 1}


def rank_table(mesh: tuple[int, int, int], rank_order: tuple[int, ...] | None = None) -> Ints:
    """Return the ranks of each device of each pipeline; `mesh` and shape are (pp, dp, width)."""
    places = np.arange(prod(mesh), dtype=np.int64).reshape(mesh)
    return places if rank_order is None else np.array(rank_order, dtype=np.int64)[places]


def refuse_layers(layers_per_stage: Sequence[int], stages: int, layers: int) -> str | None:
    """Return the reason why a chain of `layers` cannot be cut into `stages` with these counts, or None."""
    if len(layers_per_stage) != stages:
        given = counted(len(layers_per_stage), "stage")
        return f"layers for {given} are given, pp x loops = {counted(stages, 'stage')}"
    if min(layers_per_stage) < 1:
        return (
            f"stage {layers_per_stage.index(min(layers_per_stage))} is given no layer; at least 1 is needed"
        )
    if sum(layers_per_stage) != layers:
        return f"the stages are given {counted(sum(layers_per_stage), 'layer')}, the model has {layers}"
    return None


def refuse_recomputes(recomputes: Sequence[Recompute], stages: int) -> str | None:
    """Return the reason why one `recompute` word per stage does not fit the number of stages, or None."""
    if len(recomputes) == stages:
        return None
    return (
        f"recompute of {counted(len(recomputes), 'stage')} is given, pp x loops = {counted(stages, 'stage')}"
    )


def refuse_splits(splits: Sequence[int], stages: int, micro_batch_size: int) -> str | None:
    """Return the reason why stages cannot split micro-batches into these numbers of parts, or None."""
    if len(splits) != stages:
        return f"splits of {counted(len(splits), 'stage')} are given, pp x loops = {counted(stages, 'stage')}"
    odd = next((count for count in splits if micro_batch_size % count), None)
    if odd is None:
        return None
    near = nearest_divisor(odd, micro_batch_size)
    size = counted(micro_batch_size, "sample")
    return f"micro-batches of {size} cannot be split in {odd}; nearest splits: {near}"


def refuse_order(rank_order: Sequence[int], ranks: int, width: int) -> str | None:
    """Return the reason why a rank order is illegal for replicas of `width` ranks, or None."""
    if len(rank_order) != ranks:
        given = counted(len(rank_order), "device")
        return f"the rank order has {given}, the layout has {counted(ranks, 'rank')}"
    missing = sorted(set(range(ranks)) - set(rank_order))
    if missing:
        return f"the rank order leaves device {missing[0]} out; each of 0 to {ranks - 1} must be named once"
    for first in range(0, ranks, width):
        together = list(rank_order[first : first + width])
        if together != sorted(together):
            near = order_text(sorted(together))
            return f"ranks of one replica of a stage sit on devices {order_text(together)}; nearest: {near}"
    return None


def refuse_batch(global_batch: int, dp: int, micro_batch_size: int) -> str | None:
    """Return the reason why replicas cannot have equal shares of the batch, or None."""
    samples = dp * micro_batch_size
    if global_batch % samples == 0:
        return None
    near = max(samples, samples * round(global_batch / samples))
    return (
        f"global batch {global_batch} is not a multiple of dp {dp} x micro-batch size "
        f"{micro_batch_size} = {samples}; nearest global batch: {near}"
    )


def refuse_shares(
    micro_batches: Sequence[int], global_batch: int, dp: int, micro_batch_size: int
) -> str | None:
    """Return the reason why replicas cannot run these numbers of micro-batches, or None."""
    if len(micro_batches) != dp:
        return f"shares for {counted(len(micro_batches), 'replica')} are given, dp is {dp}"
    if min(micro_batches) < 1:
        return (
            f"replica {micro_batches.index(min(micro_batches))} is given no micro-batch; at least 1 is needed"
        )
    samples = sum(micro_batches) * micro_batch_size
    if samples != global_batch:
        return (
            f"{counted(sum(micro_batches), 'micro-batch')} of {micro_batch_size} = "
            f"{counted(samples, 'sample')}, the global batch is {global_batch}; "
            f"nearest global batch: {samples}"
        )
    return None
