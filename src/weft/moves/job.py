"""`Job`: the input of planners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.one_line import one_line
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.plan import Choice, LayerChoice
from weft.moves.move import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job without its layout: model, cluster, batch, sequence and precision.

    `methods`: methods that the job requests by name. `optimizer`: the memory and traffic of optimizer steps.
    `sync_options`: options of the synchronisation, if the job chooses one. `layer_choices`: requests for
    single layers; the layers of `graph` include them.
    """

    graph: LayerGraph
    cluster: Cluster
    global_batch: int
    sequence: int
    precision: str = "fp32"
    methods: tuple[Choice, ...] = ()
    optimizer: OptimizerWork = ADAMW
    sync_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    layer_choices: tuple[LayerChoice, ...] = ()

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        asked = f"global batch {self.global_batch}, sequence {self.sequence}, {self.precision}"
        return f"{self.graph.name} on {self.cluster.name}: {asked}"


def job_of(context: Context) -> Job:
    """Return the job of the context's plan."""
    plan = context.plan
    return Job(
        graph=context.graph,
        cluster=context.cluster,
        global_batch=plan.global_batch,
        sequence=plan.sequence,
        precision=plan.precision,
        methods=plan.methods,
        optimizer=plan.optimizer,
        sync_options=plan.sync.options,
        layer_choices=plan.layer_choices,
    )
