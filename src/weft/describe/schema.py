"""JSON Schemas of files for people and tools, such as `Summary`, the results of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.cluster_tables import ClusterFile
from weft.describe.plan_file import PlanKeys
from weft.describe.run_file import RunFile
from weft.describe.run_tables.methods import run_tables
from weft.errors import require_choice

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Summary(BaseModel):
    """The content of `summary.json` in a run directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str = Field(description="path of the plan, relative to the run directory")
    plan_id: str
    world_size: Count
    steps: Count
    predicted_step_s: Positive
    predicted_step_low_s: Positive
    predicted_step_high_s: Positive
    predicted_peak_bytes: tuple[int, ...] = Field(description="of each rank")
    measured_step_s: Positive = Field(
        description="median after 5 warm-up steps; of a shorter run, the last step"
    )
    first_loss: float = Field(description="before the first step, nats per target on held-out samples")
    final_loss: float = Field(description="after the last step, nats per target on held-out samples")
    final_metrics: dict[str, float] = Field(
        default_factory=dict, description="means over held-out samples after the last step, such as accuracy"
    )
    tokens_per_s: Positive
    max_rss_bytes: tuple[int, ...] = Field(description="largest resident memory of each rank")
    max_device_bytes: tuple[int, ...] = Field(
        default=(), description="most bytes held on the accelerator of each rank; empty on CPUs"
    )
    checkpoints: Annotated[int, Field(ge=0)] = Field(
        default=0, description="completed, by all starts of the run"
    )
    checkpoint_stall_s: float = Field(default=0.0, description="how long training stood still for them")
    checkpoint_write_s: float = Field(
        default=0.0, description="how long they were written while training went on"
    )


_DRAFT = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: Mapping[str, type[BaseModel]] = {
    "run": RunFile,
    "cluster": ClusterFile,
    "plan": PlanKeys,
    "summary": Summary,
}


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema of one kind of file: ``run``, ``cluster``, ``plan`` or ``summary``.

    Raises:
        InputError: for any other kind.
    """
    require_choice("schema", kind, SCHEMAS)
    schema = {"$schema": _DRAFT, **SCHEMAS[kind].model_json_schema()}
    if kind == "run":
        for name, one in run_tables().items():
            table = one.table.model_json_schema()
            schema["$defs"] |= table.pop("$defs", {})
            schema["properties"][name] = table
    if kind == "plan":
        # For people and tools; the reader computes the id from the decisions.
        schema["properties"] = {
            "plan_id": {"type": "string", "description": "hash of the decisions; ignored when read"},
            **schema["properties"],
        }
    return schema
