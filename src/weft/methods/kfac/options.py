"""The options of K-FAC: the table `[kfac]`, and the linear layers that a plan treats."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.describe.plan import Plan
from weft.describe.run_tables.methods import RunTable, planned_options
from weft.describe.toml_table import Count, TomlTable
from weft.methods.kfac.linears import treated_in, treated_text

NAME = "kfac"
Damping = Annotated[float, Field(gt=0)]
FormName = Literal["inverse", "eigen"]


class KfacTable(TomlTable):
    """The keys of `[kfac]`."""

    damping: Damping = Field(default=1e-3, description="added to the curvature before it is inverted")
    every: Count = Field(default=10, description="steps from one inversion to the next, without [bubble]")
    form: FormName = Field(
        default="inverse", description="inverse: each factor is damped; eigen: their product is, exactly"
    )


class KfacOptions(KfacTable):
    """A plan's options; `linears` as `treated_text` writes them."""

    linears: str


TABLE = RunTable(
    method=NAME,
    table=KfacTable,
    options=lambda table: table.model_dump(),
    model_options=lambda table, model: {"linears": treated_text(treated_in(model))},
    scales=False,
)


def options_of(plan: Plan) -> KfacOptions | None:
    """Return the options of a plan's K-FAC, or None if it has none.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    return planned_options(KfacOptions, plan, NAME)
