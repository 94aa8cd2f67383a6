"""On what a run is trained, and how: `[cluster]`, `[goal]`, `[plan]` and `[sync]` of a RUN.toml.

What is left out here is decided by the planner.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.describe.layout import PartialLayout
from weft.describe.plan import Count
from weft.describe.toml_table import TomlTable, Word


class ClusterTable(TomlTable):
    """`[cluster]`."""

    use: Word = Field(
        default="this-machine", description="this-machine, an expression such as 64xa100-80gb, or a file"
    )


class GoalTable(TomlTable):
    """`[goal]`: what the planner minimises, and what it may change for that."""

    minimise: Literal["time", "memory", "cost"] = "time"
    contract: Literal["exact", "function-preserving", "unbiased", "empirical"] = "exact"
    deadline_hours: Annotated[float, Field(gt=0)] | None = None


class ThenTable(PartialLayout):
    """`then` of `[plan]`: decisions for the plan that takes over when so many steps are done."""

    at_step: Count = Field(description="steps done before this plan takes over")


class PlanTable(PartialLayout):
    """`[plan]`: decisions taken away from the planner, and which planner makes the others."""

    planner: Word | None = Field(
        default=None,
        description="which planner searches: homogeneous, uniform, megatron, amp, annealing, metis-form, "
        "random or exhaustive",
    )
    then: ThenTable | None = Field(
        default=None,
        description="another plan for the steps from at_step on: at_step and the keys of this table",
    )


class SyncTable(TomlTable):
    """`[sync]`: how replicas agree."""

    method: Word | None = Field(default=None, description="dense, unless an installed package adds another")
