"""Rows with products in 8 bits, emulated: one process scales and rounds the operands of the same blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Method
from small_plans import divisible

from weft.describe.plan import LayerChoice
from weft.methods.fp8_linears.options import NAME


@dataclass(frozen=True)
class EightBits(Method):
    """The blocks of these positions, by a recipe."""

    recipe: str = "tensorwise"
    layers: tuple[int, ...] = (1, 2)

    @property
    def layer_choices(self) -> tuple[LayerChoice, ...]:
        return (LayerChoice(name=NAME, layers=self.layers, value=self.recipe),)


def of_sixteens(family: str) -> Row:
    """A model whose products all have sides that 16 divides."""
    return Row(replace(divisible(family), hidden=32, feed_forward=48), methods=(EightBits(),))


GPT, LLAMA, BERT = (of_sixteens(family) for family in ("gpt", "llama", "bert"))
ROWWISE = (EightBits("rowwise"),)
ROWS = (
    replace(GPT, schedule="1f1b", pp=2),
    replace(LLAMA, schedule="1f1b", pp=2, recompute="selective", methods=ROWWISE),
    replace(LLAMA, schedule="breadth-first", dp=2, loops=2, recompute="full"),
    replace(BERT, dp=2, sharding="zero-1", methods=(*ROWWISE, Clips(0.2))),
    replace(GPT, dp=2, sharding="zero-2", methods=ROWWISE),
    replace(LLAMA, dp=2, sharding="zero-3", methods=(EightBits(layers=(2,)),)),
    replace(LLAMA, schedule="1f1b", pp=2, dp=2, sharding="zero-1", precision="bf16", same_bits=True),
)
if find_spec("torchao") is None:
    ROWS = ()
