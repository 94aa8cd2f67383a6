"""Rows with windows: one process lets the same blocks attend to the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Method
from small_plans import divisible

from weft.describe.plan import LayerChoice
from weft.methods.attention_window.options import NAME


@dataclass(frozen=True)
class Windows(Method):
    """Blocks, by position in the model, with the tokens that theirs attend to."""

    tokens_of: tuple[tuple[int, int], ...] = ((1, 3), (2, 5))

    @property
    def layer_choices(self) -> tuple[LayerChoice, ...]:
        return tuple(LayerChoice(name=NAME, layers=(layer,), value=size) for layer, size in self.tokens_of)


GPT, LLAMA, WINDOWS = divisible("gpt"), divisible("llama"), (Windows(),)
ROWS = (
    Row(GPT, "1f1b", pp=2, recompute="full", methods=WINDOWS),
    Row(LLAMA, "zb-h1", pp=2, recompute="selective", methods=WINDOWS),
    Row(LLAMA, "breadth-first", dp=2, loops=2, methods=(*WINDOWS, Clips(0.2))),
    Row(GPT, tp=2, methods=WINDOWS),
)
