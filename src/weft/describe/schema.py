"""JSON Schema of the files that people and tools write and read, for editors and for validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from weft.describe.cluster_tables import ClusterFile
from weft.describe.plan_file import PlanKeys
from weft.describe.run_file import RunFile
from weft.describe.run_tables.methods import run_tables
from weft.describe.summary import Summary
from weft.errors import require_choice

_DRAFT = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: Mapping[str, type[BaseModel]] = {
    "run": RunFile,
    "cluster": ClusterFile,
    "plan": PlanKeys,
    "summary": Summary,
}


def json_schema(kind: str) -> dict[str, Any]:
    """The schema of one kind of file: ``run``, ``cluster``, ``plan`` or ``summary``.

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
        # Written for people and tools; read back from the decisions, not from here.
        schema["properties"] = {
            "plan_id": {"type": "string", "description": "hash of the decisions; ignored when read"},
            **schema["properties"],
        }
    return schema
