"""`[fp8-linears]`: the recipe by which operands of products are scaled to 8 bits."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from weft.describe.contract import Contract
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import LayerChoice
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import TomlTable
from weft.errors import InputError, Violation
from weft.methods.fp8_linears.products import converted

NAME = "fp8-linears"
Recipe = Literal["tensorwise", "rowwise"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)


class Fp8LinearsTable(TomlTable):
    """The keys of `[fp8-linears]`."""

    recipe: Recipe = Field(
        default="tensorwise",
        description='torchao\'s recipe: one scale per operand, or "rowwise": one per row',
    )


def choices_of(table: Fp8LinearsTable, graph: LayerGraph) -> tuple[LayerChoice, ...]:
    """Return the choice of all blocks with products that can be converted.

    Raises:
        InputError: when the model has none.
    """
    # The first layer embeds and the last one is the head, of any model.
    inner = range(1, len(graph.layers) - 1)
    layers = tuple(index for index in inner if converted(graph.layers[index]))
    if not layers:
        raise InputError(Violation(NAME, "the model has no blocks with linear products of multiples of 16"))
    return (LayerChoice(name=NAME, layers=layers, value=table.recipe),)


TABLE = RunTable(
    method=NAME, table=Fp8LinearsTable, choices=choices_of, contract=lambda table: Contract.EMPIRICAL
)
