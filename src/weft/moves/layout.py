"""From the degrees of a homogeneous layout to a Plan.

A `Layout` is what planners search: sizes of the mesh axes, loops, micro-batch size and schedule. `build_plan`
turns it into stages, ranks and shares; `refuse` says why it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.errors import InputError, Violation
from weft.moves.move import Context
from weft.moves.partition import balanced_partition
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What must be computed, whatever the layout: model, cluster, batch, sequence and precision."""

    graph: LayerGraph
    cluster: Cluster
    global_batch: int
    sequence: int
    precision: str = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees and choices of one homogeneous layout; `options` are the schedule's."""

    pipeline_parallel: int
    data_parallel: int
    loops: int
    micro_batch_size: int
    schedule: str
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    sync: str = "dense"

    @property
    def stages(self) -> int:
        return self.pipeline_parallel * self.loops

    def __str__(self) -> str:
        text = f"pp {self.pipeline_parallel} x dp {self.data_parallel}, {self.schedule}"
        if self.loops > 1:
            text += f", {self.loops} loops"
        return f"{text}, micro-batch size {self.micro_batch_size}"


def job_of(context: Context) -> Job:
    """The job that the context's plan does."""
    plan = context.plan
    return Job(
        graph=context.graph,
        cluster=context.cluster,
        global_batch=plan.global_batch,
        sequence=plan.sequence,
        precision=plan.precision,
    )


def flops_per_layer(job: Job) -> list[float]:
    """Weights for balancing stages when nothing has been measured."""
    shape = Shape(1, job.sequence)
    return [layer.flops(shape) for layer in job.graph.layers]


def pipeline_of(job: Job, layout: Layout) -> Pipeline:
    """The abstract pipeline that one replica of the layout runs."""
    micro_batches = job.global_batch // (layout.data_parallel * layout.micro_batch_size)
    return Pipeline(layout.pipeline_parallel, layout.stages, micro_batches)


def refuse(job: Job, layout: Layout) -> str | None:
    """Why this layout cannot run this job (given, allowed, nearest), or None."""
    ranks = layout.pipeline_parallel * layout.data_parallel
    if ranks > job.cluster.ranks:
        return f"pp x dp = {ranks} ranks, the cluster has {job.cluster.ranks}"
    samples = layout.data_parallel * layout.micro_batch_size
    if job.global_batch % samples:
        near = max(samples, samples * round(job.global_batch / samples))
        return (
            f"global batch {job.global_batch} is not a multiple of dp {layout.data_parallel} x micro-batch "
            f"size {layout.micro_batch_size} = {samples}; nearest global batch: {near}"
        )
    layers = len(job.graph.layers)
    if layout.stages > layers:
        return f"pp x loops = {layout.stages} stages, the model has {layers} layers to spread"
    if not job.graph.is_chain and layout.stages > 1:
        return "the model's layers are not a chain; only one stage is supported for it"
    return get_schedule(layout.schedule).refuse(pipeline_of(job, layout), layout.options)


def build_plan(job: Job, layout: Layout, layer_seconds: Sequence[float]) -> Plan:
    """The Plan of a layout: contiguous stages balanced by `layer_seconds` (one weight per layer).

    Ranks are numbered with the data-parallel axis innermost, so that the replicas of a stage, whose
    gradients are large, are neighbours.

    Raises:
        InputError: when the layout cannot run the job.
    """
    reason = refuse(job, layout)
    if reason is not None:
        raise InputError(Violation(str(layout), reason))
    pipeline = pipeline_of(job, layout)
    placement = get_schedule(layout.schedule).placement(pipeline)
    parts = balanced_partition(layer_seconds, layout.stages)
    degree = layout.data_parallel
    stages = tuple(
        Stage(
            layers=tuple(layers),
            replicas=tuple(
                Replica(ranks=(int(device) * degree + copy,), micro_batches=pipeline.micro_batches)
                for copy in range(degree)
            ),
        )
        for layers, device in zip(parts, placement, strict=True)
    )
    return Plan(
        model=job.graph.name,
        model_fingerprint=job.graph.fingerprint,
        cluster=job.cluster.name,
        cluster_fingerprint=job.cluster.fingerprint,
        sequence=job.sequence,
        global_batch=job.global_batch,
        micro_batch_size=layout.micro_batch_size,
        precision=job.precision,  # type: ignore[arg-type]  # pydantic refuses what the literal does not name
        mesh={"pp": layout.pipeline_parallel, "dp": degree},
        stages=stages,
        schedule=Choice(name=layout.schedule, options=dict(layout.options)),
        sync=Choice(name=layout.sync),
    )


def layout_of(plan: Plan) -> Layout:
    """The layout that `plan` was built from.

    Raises:
        InputError: when the plan is not a homogeneous layout of one-rank replicas.
    """
    copies = {len(stage.replicas) for stage in plan.stages}
    shares = {copy.micro_batches for stage in plan.stages for copy in stage.replicas}
    widths = {len(copy.ranks) for stage in plan.stages for copy in stage.replicas}
    if len(copies) != 1 or len(shares) != 1 or widths != {1}:
        raise InputError(Violation("plan", "its replicas differ in number, share or width; not homogeneous"))
    pipeline_parallel = plan.mesh.get("pp", 1)
    return Layout(
        pipeline_parallel=pipeline_parallel,
        data_parallel=copies.pop(),
        loops=-(-len(plan.stages) // pipeline_parallel),
        micro_batch_size=plan.micro_batch_size,
        schedule=plan.schedule.name,
        options=plan.schedule.options,
        sync=plan.sync.name,
    )
