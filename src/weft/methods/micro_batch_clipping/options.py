"""The options of micro-batch clipping: the table `[clip]`, and the options of a plan's method."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from weft.describe.contract import Contract
from weft.describe.plan import MICRO_BATCH_CLIPPING, Choice, Plan
from weft.describe.run_tables.methods import Options, RunTable, checked_options, planned_options
from weft.describe.run_tables.training import TaskTable
from weft.describe.tasks import sources_of
from weft.describe.toml_table import TOML_ARRAY, Count, TomlTable
from weft.errors import InputError, Violation

NAME = MICRO_BATCH_CLIPPING
TABLE_NAME = "clip"
# The norm to which gradients of micro-batches are clipped: the least of a step, a given one, or a quantile of
# those of the step before.
Bound = Literal["min", "fixed", "quantile", "off"]
# The part of the model whose gradient has one norm.
Scope = Literal["model", "stage"]
_COUNTS = re.compile(r"[0-9]{1,6}(,[0-9]{1,6})*", re.ASCII)


def _counts(given: object) -> object:
    """Return the counts of a text; a plan's options hold counts as text, such as ``2,4``."""
    known = isinstance(given, str) and _COUNTS.fullmatch(given)
    return tuple(map(int, given.split(","))) if known else given  # type: ignore[attr-defined]


class ClipTable(TomlTable):
    """The keys of `[clip]`."""

    micro: Bound = Field(
        default="min", description="the norm that gradients of micro-batches get: min, fixed, quantile or off"
    )
    samples: Count = Field(
        description="samples of a clipped micro-batch; the plan's micro-batches are parts of them"
    )
    bound: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the largest norm of a micro-batch's mean gradient; for fixed"
    )
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="of the last step's norms, which bounds those of a step; for quantile",
    )
    sources: Count = Field(
        default=1, description="sources of the data, each with a bound of its own; for min and quantile"
    )
    floor: Annotated[float, Field(ge=0)] = Field(
        default=1e-12, description="a gradient with at most this norm adds nothing and sets no bound"
    )
    scope: Scope = Field(
        default="model",
        description="what has one norm: the model, or each stage of layers_per_stage, another method",
    )
    layers_per_stage: Annotated[tuple[Count, ...], TOML_ARRAY, BeforeValidator(_counts)] = Field(
        default=(), description="the layers of each stage with a norm of its own; for scope stage"
    )

    @model_validator(mode="after")
    def _together(self) -> ClipTable:
        problems = []
        for key, word in (("bound", "fixed"), ("quantile", "quantile")):
            value = getattr(self, key)
            if (self.micro == word) != (value is not None):
                given = "missing" if value is None else f"{value:g}"
                near = "0.5" if value is None else "leave it out"
                problems.append(Violation(key, f"{given}; micro is {self.micro!r}", near))
        if self.sources > 1 and self.micro not in ("min", "quantile"):
            problems.append(Violation("sources", f"{self.sources}; micro is {self.micro!r}", "1"))
        if (self.scope == "stage") != bool(self.layers_per_stage):
            given = "given" if self.layers_per_stage else "missing"
            near = "leave it out" if self.layers_per_stage else "the layers of each stage, such as [3, 3]"
            problems.append(Violation("layers_per_stage", f"{given}; scope is {self.scope!r}", near))
        if problems:
            raise InputError(problems)
        return self

    @property
    def by_stage(self) -> bool:
        """True if each stage clips by the norm of its own gradient."""
        return self.scope == "stage"


def _options(table: ClipTable) -> Options | None:
    if table.micro == "off":
        return None
    options: dict[str, int | float | str | bool] = table.model_dump(
        exclude_none=True, exclude={"scope", "layers_per_stage"}
    )
    cut = ",".join(map(str, table.layers_per_stage))
    return options | {"scope": "stage", "layers_per_stage": cut} if table.by_stage else options


def _contract(table: ClipTable) -> Contract:
    """Return exact for the norm of the model, and empirical for stages: no part has the model's norm."""
    return Contract.EMPIRICAL if table.by_stage and table.micro != "off" else Contract.EXACT


def _task_problems(table: ClipTable, task: TaskTable) -> Iterator[Violation]:
    if table.sources == 1:
        return
    sources = len(sources_of(task.data))
    if table.sources != sources:
        problem = f"{table.sources} have bounds of their own; the data has {sources}"
        yield Violation(f"{TABLE_NAME}.sources", problem, str(sources))
    elif task.source_block % table.samples:
        problem = f"{task.source_block}; {table.samples} samples of one source are clipped together"
        yield Violation("task.source_block", problem, str(table.samples))


TABLE = RunTable(
    method=NAME,
    key=TABLE_NAME,
    table=ClipTable,
    options=_options,
    task_problems=_task_problems,
    contract=_contract,
)


def read_options(choice: Choice) -> ClipTable:
    """Return the options of clipping in a plan or a job.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    return checked_options(ClipTable, choice, TABLE_NAME)


def options_of(plan: Plan) -> ClipTable | None:
    """Return the options of a plan's clipping, or None if it has none.

    Raises:
        InputError: as `read_options`.
    """
    return planned_options(ClipTable, plan, NAME)
