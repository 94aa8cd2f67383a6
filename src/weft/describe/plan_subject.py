"""`PlanSubject`: the run file, the model and the cluster of a plan; with it a plan file needs no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import cluster_of, parse_cluster
from weft.describe.cluster_tables import ClusterFile, cluster_record
from weft.describe.left_out import without
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.run_file import RunFile, naming
from weft.describe.units import shown
from weft.errors import InputError, Violation


def _cluster(value: object) -> Cluster:
    if isinstance(value, Cluster):
        return value
    if not isinstance(value, Mapping):
        raise InputError(Violation("", f"{shown(value)}: must be an object with the keys of a cluster file"))
    return cluster_of(value, "")


class PlanSubject(BaseModel):
    """Hold the run file, the model's sizes and the cluster of a plan.

    Weights, tokens and user-defined models remain where `run` names them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunFile = Field(description="the run file with its defaults")
    model: ModelConfig = Field(description="sizes of the model")
    cluster: Annotated[
        Cluster,
        PlainValidator(_cluster, json_schema_input_type=ClusterFile),
        PlainSerializer(cluster_record, return_type=dict[str, Any]),
    ] = Field(description="the tables of a cluster file")

    def __repr__(self) -> str:
        return one_line(self, f"{self.model.name} on {self.cluster.name}, {self.run.train.steps} steps")

    def __str__(self) -> str:
        return repr(self)

    def pinned(self, plan: Plan) -> PlanSubject:
        """Return the subject whose run file says a plan's batch, sequence, precisions and compilation."""
        names = ("global_batch", "precision", "reduce_precision")
        decided = {name: getattr(plan, name) for name in names} | {"compile": plan.launch == "compiled"}
        tables = {
            "train": self.run.train.model_copy(update=decided),
            "task": self.run.task.model_copy(update={"sequence": plan.sequence}),
        }
        return self.model_copy(update={"run": self.run.model_copy(update=tables)})

    def changed(self, *, model: str | None = None, on: str | None = None) -> PlanSubject:
        """Return the subject with another model and another cluster, by their names; None keeps one.

        Raises:
            InputError: for an unknown name.
        """
        return PlanSubject(
            run=naming(self.run, model=model, on=on),
            model=self.model if model is None else resolve_model(model, sequence=self.run.task.sequence),
            cluster=self.cluster if on is None else parse_cluster(on),
        )


def subject_of(run: RunFile) -> PlanSubject:
    """Resolve the names of a run file.

    Raises:
        InputError: for an unknown model or cluster.
    """
    name = run.model.preset or run.model.hf or run.model.build or ""
    return PlanSubject(
        run=run,
        model=resolve_model(name, sequence=run.task.sequence),
        cluster=cluster_of_run(run),
    )


def cluster_of_run(run: RunFile) -> Cluster:
    """Return the nodes that a run file names, less those that it leaves out.

    Raises:
        InputError: for an unknown cluster, or unknown nodes.
    """
    return without(parse_cluster(run.cluster.use), run.cluster.without or ())
