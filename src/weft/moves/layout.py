"""From the degrees of a layout to a Plan.

A `Layout` is what planners search: sizes of the mesh axes, loops, micro-batch size, schedule, sharding and
recomputation, and where stages, replicas or ranks are unlike each other, how. `build_plan` turns it into
stages, ranks and shares; `refuse` says why it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from weft.describe.amount import Shape
from weft.describe.one_line import one_line
from weft.describe.plan import (
    RECOMPUTES,
    Blocking,
    Choice,
    Plan,
    Recompute,
    Replica,
    Sharding,
    Stage,
    refuse_island,
    shared_out,
)
from weft.errors import InputError, Violation
from weft.moves import uneven
from weft.moves.composition import refuse_composition
from weft.moves.job import Job
from weft.moves.partition import balanced_partition
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, paths_of, placements

# How replicas agree unless somebody says otherwise.
DENSE = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees and choices of one layout; `options` are the schedule's.

    `recompute` is that of all stages, or the heaviest of `recompute_per_stage`, which says it of each (see
    `recomputing`). See `weft.describe.plan.Plan` for `sharding`, `island` and `blocking`. `layers_per_stage`
    cuts the chain of layers; None balances the stages. `rank_order` says which device of the cluster takes
    each rank of the mesh (axes pp, dp, cp, tp, outermost first), rising in each replica of a stage; None: the
    device of the same number. `micro_batches_per_replica` are those of each of the `data_parallel` pipelines;
    None shares the batch out equally.
    """

    pipeline_parallel: int
    data_parallel: int
    loops: int
    micro_batch_size: int
    schedule: str
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    sync: str = DENSE
    tensor_parallel: int = 1
    context_parallel: int = 1
    sharding: Sharding = "zero-0"
    island: int | None = None
    recompute: Recompute = "none"
    recompute_per_stage: tuple[Recompute, ...] | None = None
    blocking: tuple[Blocking, ...] = ()
    layers_per_stage: tuple[int, ...] | None = None
    rank_order: tuple[int, ...] | None = None
    micro_batches_per_replica: tuple[int, ...] | None = None

    @property
    def regular(self) -> Layout:
        """The same degrees and choices with balanced stages, alike in recompute, ranks in order and equal
        shares."""
        return replace(
            self,
            recompute_per_stage=None,
            layers_per_stage=None,
            rank_order=None,
            micro_batches_per_replica=None,
        )

    @property
    def width(self) -> int:
        """Ranks of one replica of a stage."""
        return self.context_parallel * self.tensor_parallel

    @property
    def ranks(self) -> int:
        return self.pipeline_parallel * self.data_parallel * self.width

    @property
    def stages(self) -> int:
        return self.pipeline_parallel * self.loops

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """What each stage recomputes."""
        return self.recompute_per_stage or (self.recompute,) * self.stages

    @property
    def recompute_text(self) -> str:
        """What stages recompute, in words."""
        each = self.recompute_per_stage
        return self.recompute if each is None else uneven.recomputes_text(each)

    def recomputing(self, recompute: Recompute | Sequence[Recompute]) -> Layout:
        """The same layout with one word for all stages, or one for each."""
        words = (recompute,) if isinstance(recompute, str) else tuple(recompute)
        alike = isinstance(recompute, str) or (len(set(words)) == 1 and len(words) == self.stages)
        heaviest = max(words, key=RECOMPUTES.index)
        return replace(self, recompute=heaviest, recompute_per_stage=None if alike else words)

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        text = f"pp {self.pipeline_parallel} x dp {self.data_parallel}"
        if self.context_parallel > 1:
            text += f" x cp {self.context_parallel}"
        if self.tensor_parallel > 1:
            text += f" x tp {self.tensor_parallel}"
        text += f", {self.schedule}"
        if self.options:
            text += f" ({', '.join(f'{option} {value}' for option, value in self.options.items())})"
        if self.loops > 1:
            text += f", {self.loops} loops"
        text += f", micro-batch size {self.micro_batch_size}"
        if self.sharding != "zero-0" or self.island is not None:
            text += f", {shared_out(self.sharding, self.island)}"
        if self.recompute_per_stage is not None or self.recompute != "none":
            text += f", recompute {self.recompute_text}"
        if self.sync != DENSE:
            text += f", sync {self.sync}"
        if self.blocking:
            text += f", blocking {' and '.join(self.blocking)}"
        if self.layers_per_stage is not None:
            text += f", layers {uneven.counts_text(self.layers_per_stage)}"
        if self.micro_batches_per_replica is not None:
            text += f", shares {uneven.counts_text(self.micro_batches_per_replica)}"
        if self.rank_order is not None:
            text += f", devices {uneven.order_text(self.rank_order)}"
        return text


def flops_per_layer(job: Job) -> list[float]:
    """Weights for balancing stages when nothing has been measured."""
    shape = Shape(1, job.sequence)
    return [layer.flops(shape) for layer in job.graph.layers]


def shares_of(job: Job, layout: Layout) -> tuple[int, ...]:
    """Micro-batches per step of each of the layout's `data_parallel` pipelines."""
    if layout.micro_batches_per_replica is not None:
        return layout.micro_batches_per_replica
    share = job.global_batch // (layout.data_parallel * layout.micro_batch_size)
    return (share,) * layout.data_parallel


def pipeline_of(job: Job, layout: Layout) -> Pipeline:
    """The abstract pipeline of the replica that runs most micro-batches."""
    return Pipeline(layout.pipeline_parallel, layout.stages, max(shares_of(job, layout)))


def parts_of(layout: Layout, layer_seconds: Sequence[float]) -> list[list[int]]:
    """Positions of each stage's layers; balanced by `layer_seconds` unless the layout cuts them itself.

    Raises:
        InputError: when there are fewer layers than stages.
    """
    if layout.layers_per_stage is None:
        return balanced_partition(layer_seconds, layout.stages)
    cuts = accumulate(layout.layers_per_stage, initial=0)
    return [list(range(first, last)) for first, last in pairwise(cuts)]


def replicas_of(layout: Layout) -> int:
    """Copies of every stage: one for each path of each pipeline."""
    return layout.data_parallel * paths_of(get_schedule(layout.schedule))


def refuse(job: Job, layout: Layout) -> str | None:
    """Why this layout cannot run this job (given, allowed, nearest), or None."""
    if layout.ranks > job.cluster.ranks:
        return f"{' x '.join(_mesh(layout))} = {layout.ranks} ranks, the cluster has {job.cluster.ranks}"
    layers = len(job.graph.layers)
    if layout.stages > layers:
        return f"pp x loops = {layout.stages} stages, the model has {layers} layers to spread"
    if not job.graph.is_chain and layout.stages > 1:
        return "the model's layers are not a chain; only one stage is supported for it"
    if (unshared := _refuse_shared(job, layout)) is not None:
        return unshared
    refused = refuse_island(layout.sharding, layout.island, replicas_of(layout))
    if refused is not None:
        problem, nearest = refused
        return f"{problem}; nearest {'sharding' if layout.sharding == 'zero-0' else 'island'}: {nearest}"
    if (refused_share := _refuse_share(job, layout)) is not None:
        return refused_share
    return (
        refuse_composition(job, layout)
        or job.graph.refuse_tensor(layout.tensor_parallel)
        or job.graph.refuse_context(layout.context_parallel, job.sequence)
        or _refuse_order_of_any(job, layout)
    )


def _refuse_shared(job: Job, layout: Layout) -> str | None:
    """Why the batch, the layers or the devices cannot be shared out like this."""
    batch, size, given = job.global_batch, layout.micro_batch_size, layout.micro_batches_per_replica
    if given is None:
        reason = uneven.refuse_batch(batch, layout.data_parallel, size)
    else:
        reason = uneven.refuse_shares(given, batch, layout.data_parallel, size)
    if reason is None and layout.layers_per_stage is not None:
        reason = uneven.refuse_layers(layout.layers_per_stage, layout.stages, len(job.graph.layers))
    if reason is None and layout.recompute_per_stage is not None:
        reason = uneven.refuse_recomputes(layout.recompute_per_stage, layout.stages)
    if reason is None and layout.rank_order is not None:
        reason = uneven.refuse_order(layout.rank_order, layout.ranks, layout.width)
    return reason


def _refuse_share(job: Job, layout: Layout) -> str | None:
    """Why ranks cannot step a share of a parameter each."""
    if job.optimizer.elementwise:
        return None
    reason = "the optimizer is not known to step every element by itself"
    if layout.sharding != "zero-0":
        return f"{layout.sharding} shares out what is stepped, and {reason}; nearest sharding: zero-0"
    if layout.tensor_parallel > 1:
        return f"tensor ranks step a share of every matrix, and {reason}; nearest tp: 1"
    return None


def _refuse_order_of_any(job: Job, layout: Layout) -> str | None:
    """Why the schedule cannot run the pipeline of one of the replicas."""
    schedule = get_schedule(layout.schedule)
    for share in dict.fromkeys(shares_of(job, layout)):
        pipeline = Pipeline(layout.pipeline_parallel, layout.stages, share)
        reason = schedule.refuse(pipeline, layout.options)
        if reason is not None:
            return reason
    return None


def build_plan(job: Job, layout: Layout, layer_seconds: Sequence[float]) -> Plan:
    """The Plan of a layout: contiguous stages, balanced by `layer_seconds` (one weight per layer) unless the
    layout cuts them itself.

    Ranks are numbered with the tensor- and context-parallel axes innermost, whose ranks meet in every layer,
    then the replicas of a stage, whose gradients are large.

    Raises:
        InputError: when the layout cannot run the job.
    """
    reason = refuse(job, layout)
    if reason is not None:
        raise InputError(Violation(str(layout), reason))
    return Plan(
        model=job.graph.name,
        model_fingerprint=job.graph.fingerprint,
        cluster=job.cluster.name,
        cluster_fingerprint=job.cluster.fingerprint,
        sequence=job.sequence,
        global_batch=job.global_batch,
        micro_batch_size=layout.micro_batch_size,
        precision=job.precision,  # type: ignore[arg-type]  # pydantic refuses what the literal does not name
        mesh=_mesh(layout),
        stages=_stages_of(job, layout, layer_seconds),
        schedule=Choice(name=layout.schedule, options=dict(layout.options)),
        sharding=layout.sharding,
        island=layout.island,
        blocking=layout.blocking,
        methods=job.methods,
        optimizer=job.optimizer,
        sync=Choice(name=layout.sync),
    )


def _stages_of(job: Job, layout: Layout, layer_seconds: Sequence[float]) -> tuple[Stage, ...]:
    placement = placements(get_schedule(layout.schedule), pipeline_of(job, layout))
    parts = parts_of(layout, layer_seconds)
    shares = shares_of(job, layout)
    columns = [tuple(devices) for devices in placement.T.tolist()]
    # The stages of a device have the same replicas.
    replicas = {
        devices: tuple(
            Replica(ranks=ranks_of(layout, device, copy), micro_batches=share // len(devices))
            for copy, share in enumerate(shares)
            for device in devices
        )
        for devices in dict.fromkeys(columns)
    }
    return tuple(
        Stage(layers=tuple(layers), replicas=replicas[devices], recompute=recompute)
        for layers, recompute, devices in zip(parts, layout.recomputes, columns, strict=True)
    )


def _mesh(layout: Layout) -> dict[str, int]:
    mesh = {"pp": layout.pipeline_parallel, "dp": layout.data_parallel}
    inner = {"cp": layout.context_parallel, "tp": layout.tensor_parallel}
    return mesh | {axis: size for axis, size in inner.items() if size > 1}


def ranks_of(layout: Layout, device: int, pipeline: int) -> tuple[int, ...]:
    """The ranks of one device of one pipeline."""
    first = (device * layout.data_parallel + pipeline) * layout.width
    places = range(first, first + layout.width)
    return tuple(places) if layout.rank_order is None else tuple(layout.rank_order[place] for place in places)
