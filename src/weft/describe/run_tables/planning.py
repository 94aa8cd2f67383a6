"""The cluster and plan of a run: `[cluster]`, `[goal]`, `[plan]` and `[sync]` of a RUN.toml.

The planner decides missing keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from weft.describe.layout import PartialLayout
from weft.describe.plan import Choice, Count
from weft.describe.synchronisation import AUTO, sync_methods, sync_options
from weft.describe.toml_table import TOML_ARRAY, TomlTable, Word
from weft.errors import InputError, Violation

# A run that dies for want of memory costs more than a slower step.
MEMORY_RISK = 0.02


class ClusterTable(TomlTable):
    """`[cluster]`."""

    use: Word = Field(
        default="this-machine", description="this-machine, an expression such as 64xa100-80gb, or a file"
    )
    without: Annotated[tuple[Word, ...], TOML_ARRAY] | None = Field(
        default=None,
        description='what the job leaves out, such as ["t4", "2 v100-16gb", "device 2"]: all nodes of a '
        "group, some of them, or one device by its rank",
    )


class GoalTable(TomlTable):
    """`[goal]`: the quantity that the planner minimises, and the changes that it may make."""

    minimise: Literal["time", "memory", "cost"] = "time"
    contract: Literal["exact", "function-preserving", "unbiased", "empirical"] = "exact"
    memory_risk: Annotated[float, Field(gt=0.0, le=0.5)] = Field(
        default=MEMORY_RISK, description="the largest probability that a plan does not fit"
    )
    deadline_hours: Annotated[float, Field(gt=0)] | None = None


class ThenTable(PartialLayout):
    """`then` of `[plan]`: decisions for the next plan, from `at_step` on."""

    at_step: Count = Field(description="steps done before this plan takes over")


class PlanTable(PartialLayout):
    """`[plan]`: pinned decisions, and the planner of the others."""

    planner: Word | None = Field(
        default=None,
        description="which planner searches: homogeneous, uniform, megatron, amp, graphpipe, "
        "pipedream, piper, equal-split, baechi, m-topo, m-etf, m-sct, heft, round-robin, expert, learned, "
        "repair, annealing, metis-form, random or exhaustive",
    )
    then: ThenTable | None = Field(
        default=None,
        description="another plan for the steps from at_step on: at_step and the keys of this table",
    )


class SyncTable(TomlTable):
    """`[sync]`: the synchronisation of replicas."""

    method: Word | None = Field(
        default=None,
        description="dense; hierarchical, which sums inside nodes first; sdp4bit, which sends four bits; "
        "power-sgd, which sends low-rank factors; clan, which encodes gradients and sums; local-averaging, "
        "which steps replicas apart and averages their weights every so many steps; slow-momentum, diloco "
        "or sign-momentum, which step on from the average; cser, which averages blocks of updates and of "
        "errors; what an installed package adds; or auto: the planner chooses the method and its keys within "
        "goal.contract",
    )
    # The method's options; in a file their keys are next to `method`.
    options: SkipJsonSchema[SerializeAsAny[TomlTable] | None] = None

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_method(cls, record: Any) -> Any:
        method = record.get("method") if isinstance(record, Mapping) else None
        if method == AUTO and (chosen := [key for key in record if key != "method"]):
            raise InputError(
                [Violation(key, f"the planner chooses it with {AUTO!r}; leave it out") for key in chosen]
            )
        # An open method needs no list of methods, which may import these tables themselves.
        if not isinstance(method, str) or "options" in record or method not in sync_methods():
            return record
        keys = {key: value for key, value in record.items() if key != "method"}
        of_method = sync_methods()[method]
        for key in of_method.derived:
            # A table that was written out has all defaults.
            if keys.pop(key, default := of_method.table.model_fields[key].default) != default:
                raise InputError(Violation(key, "weft takes it from the cluster; leave it out"))
        return {"method": method, "options": sync_options(method, keys, "")}

    @model_serializer(mode="wrap")
    def _keys_beside_the_method(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        record: dict[str, Any] = dump(self)
        of_method = record.pop("options", None) or {}
        return {**record, **of_method}

    @property
    def choice(self) -> Choice | None:
        """The method with its options that are not defaults; None if it is open."""
        if self.method is None:
            return None
        given = {} if self.options is None else self.options.model_dump(exclude_defaults=True)
        return Choice(name=self.method, options=given)
