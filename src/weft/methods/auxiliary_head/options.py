"""The options of an auxiliary head: the table `[auxiliary-head]`, and the options of a plan's method."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.plan import Choice, Plan
from weft.describe.run_tables.methods import RunTable, checked_options, planned_options
from weft.describe.toml_table import Count, TomlTable

NAME = "auxiliary-head"


class AuxiliaryHeadOptions(TomlTable):
    """The keys of `[auxiliary-head]`."""

    after_block: Count = Field(description="the head reads what this block gives; the first block is 1")
    weight: Annotated[float, Field(gt=0)] = Field(description="of its loss beside the model's own")


TABLE = RunTable(method=NAME, table=AuxiliaryHeadOptions, options=lambda table: table.model_dump())


def read_options(choice: Choice) -> AuxiliaryHeadOptions:
    """Return the options of the head in a plan or a job.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    return checked_options(AuxiliaryHeadOptions, choice, NAME)


def options_of(plan: Plan) -> AuxiliaryHeadOptions | None:
    """Return the options of a plan's head, or None if it has no head.

    Raises:
        InputError: as `read_options`.
    """
    return planned_options(AuxiliaryHeadOptions, plan, NAME)
