"""The options of K-FAC: the table `[kfac]`, and the linear layers that a plan treats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from weft.describe.block_products import block_products, has_experts
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.describe.reading import violations_of
from weft.describe.run_tables.methods import Options, RunTable
from weft.describe.toml_table import Count, TomlTable
from weft.errors import InputError, Violation

NAME = "kfac"
Damping = Annotated[float, Field(gt=0)]


class KfacTable(TomlTable):
    """The keys of `[kfac]`."""

    damping: Damping = Field(default=1e-3, description="added to the curvature before it is inverted")
    every: Count = Field(default=10, description="steps from one inversion to the next, without [bubble]")


class KfacOptions(TomlTable):
    """A plan's options; `operands` as `operands_text` writes them."""

    damping: Damping
    every: Count
    operands: str


class Operand(NamedTuple):
    """The linear layers of a block that read one value.

    Attributes:
        inner: the features that they read.
        columns: the features that each of them returns.
    """

    inner: int
    columns: tuple[int, ...]


def operands_of(config: ModelConfig) -> tuple[Operand, ...]:
    """Return the linear layers of a model's blocks by their operands, in the order of the block.

    Raises:
        InputError: for a family whose linear layers weft cannot name, and for mixtures of experts.
    """
    if any(has_experts(config, block) for block in range(config.layers)):
        problem = f"{config.name} has experts, whose tokens differ from step to step"
        raise InputError(Violation(NAME, problem, "a dense model"))
    found: dict[str, Operand] = {}
    for one in block_products(config):
        known = found.get(one.reads, Operand(one.inner, ()))
        found[one.reads] = Operand(one.inner, (*known.columns, one.columns))
    return tuple(found.values())


def operands_text(operands: Sequence[Operand]) -> str:
    """Return operands as a plan's option, such as ``64>64,32,32 64>64``."""
    return " ".join(f"{one.inner}>{','.join(map(str, one.columns))}" for one in operands)


_OPERAND = re.compile(r"(\d{1,9})>(\d{1,9}(?:,\d{1,9})*)", re.ASCII)


def read_operands(text: str) -> tuple[Operand, ...]:
    """Return the operands of a plan's option.

    Raises:
        InputError: for a text of another form.
    """
    found = [_OPERAND.fullmatch(one) for one in text.split()]
    if not found or any(one is None for one in found):
        problem = f"{text[:40]!r} does not list linear layers by operand"
        raise InputError(Violation(f"plan: methods: {NAME}: operands", problem, "64>64,32,32 64>64"))
    return tuple(Operand(int(one[1]), tuple(map(int, one[2].split(",")))) for one in found if one)


def _operands(table: KfacTable, config: ModelConfig) -> Options:
    return {"operands": operands_text(operands_of(config))}


TABLE = RunTable(
    method=NAME,
    table=KfacTable,
    options=lambda table: table.model_dump(),
    model_options=_operands,
)


def options_of(plan: Plan) -> KfacOptions | None:
    """Return the options of a plan's K-FAC, or None if it has none.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    choice = plan.method(NAME)
    return None if choice is None else read_options(choice)


def read_options(choice: Choice) -> KfacOptions:
    """Return the options of a choice.

    Raises:
        InputError: as `options_of` does.
    """
    try:
        return KfacOptions.model_validate(dict(choice.options))
    except ValidationError as error:
        raise InputError(violations_of(error, f"plan: methods: {NAME}", KfacOptions)) from None
