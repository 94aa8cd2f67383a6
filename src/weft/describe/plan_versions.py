"""Plans of earlier versions of weft: their conversion, and their former ids.

Version 1 had a field `context_parallel`, which repeated the mesh. Its field `gradient_norm` is now one of
the plan's `methods`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from weft.describe.plan import GRADIENT_NORM, Choice, Plan, id_of
from weft.describe.reading import violations_of
from weft.describe.units import shown
from weft.errors import InputError, Violation


class _Version1(BaseModel):
    """The removed fields of version 1."""

    gradient_norm: bool = False
    context_parallel: Annotated[int, Field(ge=1)] = 1


def in_this_version(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the keys of a plan file in this version; keys of version 1 are converted.

    Raises:
        InputError: when a removed field of version 1 is invalid or differs from the mesh.
    """
    if record.get("version") != 1:
        return record
    kept = {key: value for key, value in record.items() if key not in _Version1.model_fields}
    former = {key: record[key] for key in _Version1.model_fields if key in record}
    try:
        asked = _Version1.model_validate_json(json.dumps(former), strict=True)
    except ValidationError as error:
        raise InputError(violations_of(error, where, _Version1)) from None
    mesh = record.get("mesh")
    degree = mesh.get("cp", 1) if isinstance(mesh, Mapping) else asked.context_parallel
    if degree != asked.context_parallel:
        problem = f"{shown(asked.context_parallel)}; the mesh has cp {shown(degree)}"
        raise InputError(Violation(f"{where}: context_parallel", problem, shown(degree)))
    methods = {"methods": [{"name": GRADIENT_NORM}]} if asked.gradient_norm else {}
    return {**kept, **methods, "version": 2}


def current_id(plan_id: str, plan: Plan) -> str:
    """Return the id of `plan` if `plan_id` is its id in an earlier version; else return `plan_id`."""
    return plan.plan_id if plan_id in former_ids(plan) else plan_id


def former_ids(plan: Plan) -> frozenset[str]:
    """Return a plan's ids in earlier versions."""
    if plan.methods not in ((), (Choice(name=GRADIENT_NORM),)):
        return frozenset()
    record = {key: value for key, value in plan.record().items() if key != "methods"}
    record |= {"version": 1, "gradient_norm": bool(plan.methods)}
    if plan.cp > 1:
        record["context_parallel"] = plan.cp
    return frozenset({id_of(record)})
