"""On what a run is trained, and how: `[cluster]`, `[goal]`, `[plan]` and `[sync]` of a RUN.toml.

What is left out here is decided by the planner.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from weft.describe.plan import RECOMPUTES, Recompute, Sharding
from weft.describe.run_tables.training import Count
from weft.describe.toml_table import TomlTable, Word
from weft.describe.toml_text import value_text
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest


def _require_recompute(given: object) -> object:
    """One word for all stages, or a list with one for each."""
    words = given if isinstance(given, list | tuple) else [given]
    allowed = f"must be {', '.join(map(repr, RECOMPUTES[:-1]))} or {RECOMPUTES[-1]!r}"
    for stage, word in enumerate(words):
        if word not in RECOMPUTES:
            of = f" for stage {stage}" if words is given else ""
            near = nearest(word, RECOMPUTES) if isinstance(word, str) else ""
            raise InputError(Violation("", f"{shown(word)}{of}: {allowed}", near))
    if not words:
        raise InputError(Violation("", "an empty list; one word for all stages, or one for each", "none"))
    return tuple(words) if words is given else given


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


class PlanTable(TomlTable):
    """`[plan]`: decisions taken away from the planner."""

    schedule: Word | None = None
    loops: Count | None = Field(default=None, description="stages per device on a looped pipeline")
    pp: Count | None = Field(default=None, description="devices of one pipeline")
    dp: Count | None = Field(default=None, description="replicas of the pipeline")
    tp: Count | None = Field(default=None, description="devices that divide every layer among them")
    cp: Count | None = Field(
        default=None, description="devices that divide the tokens of a sample among them"
    )
    micro_batch_size: Count | None = None
    sharding: Sharding | None = Field(
        default=None, description="what replicas share out: nothing, optimizer states, gradients, weights"
    )
    island: Count | None = Field(default=None, description="replicas that share it out among themselves")
    recompute: Annotated[Recompute | tuple[Recompute, ...] | None, BeforeValidator(_require_recompute)] = (
        Field(
            default=None,
            description="full: backward passes run layers forward again; selective: all but their products; "
            "a list says it of each stage",
        )
    )
    planner: Word | None = None

    @model_validator(mode="after")
    def _a_word_for_each_stage(self) -> PlanTable:
        words, devices = self.recompute, self.pp
        if devices is None or words is None or isinstance(words, str):
            return self
        loops = self.loops or max(1, len(words) // devices)
        stages = devices * loops
        if len(words) != stages:
            given = f"pp {devices}" if self.loops is None else f"pp {devices} x loops {loops}"
            near = value_text((*words, *[words[-1]] * stages)[:stages])
            problem = f"{len(words)} words for the {stages} stages of {given}"
            raise InputError(Violation("recompute", problem, near))
        return self


class SyncTable(TomlTable):
    """`[sync]`: how replicas agree."""

    method: Word | None = Field(default=None, description="dense, unless an installed package adds another")
