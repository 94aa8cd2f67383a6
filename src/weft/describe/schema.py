"""JSON Schema of the files weft reads and writes, generated from the types that validate them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.cluster_file import ClusterTables
from weft.describe.plan import Plan
from weft.describe.run_file import RunFile
from weft.errors import require_choice


class Summary(BaseModel):
    """summary.json of a finished run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str = Field(description="path of the plan file, relative to the run directory")
    plan_id: str
    world_size: int = Field(ge=1)
    steps: int = Field(ge=0)
    predicted_step_s: float = Field(gt=0)
    predicted_step_low_s: float = Field(gt=0)
    predicted_step_high_s: float = Field(gt=0)
    predicted_peak_bytes: tuple[int, ...]
    measured_step_s: float | None = Field(description="median after five warm-up steps")
    first_loss: float = Field(description="held-out nats per token before the first step")
    final_loss: float = Field(description="held-out nats per token after the last step")
    tokens_per_s: float | None
    max_rss_bytes: tuple[int, ...] = Field(description="largest resident memory of each rank")


FILE_TYPES: Mapping[str, type[BaseModel]] = {
    "run": RunFile,
    "cluster": ClusterTables,
    "plan": Plan,
    "summary": Summary,
}


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file: run, cluster, plan or summary.

    Raises:
        InputError: for another kind.
    """
    require_choice("schema", kind, FILE_TYPES)
    return FILE_TYPES[kind].model_json_schema()
