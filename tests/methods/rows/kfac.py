"""Rows whose gradients are multiplied by inverse curvature.

Ranks never import this file: its rows take a second to plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from curvature_versions import versions_in
from equality_table import Row
from filled_plans import fills, placed
from inverse_curvature import Kfac
from methods.rows.gradient_norm import Clips
from one_process import Method
from small_plans import divisible, make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Choice
from weft.methods.bubble_filling.options import options_of


def _row(
    model: ModelConfig,
    *layout: Any,
    every: int = 1,
    bubbles: Choice | None = None,
    form: str = "inverse",
    methods: tuple[Method, ...] = (),
    steps: int = 3,
    **options: Any,
) -> Row:
    own = Kfac(model, every, form=form)
    if bubbles is not None:
        plan = Row(model, *layout, methods=(own,), **options).plan
        asked = plan.model_copy(update={"methods": (*plan.methods, bubbles)})
        own = replace(own, windows=options_of(placed(model, asked)).windows)
    plan = Row(model, *layout, methods=(own,), **options).plan
    own = replace(own, versions=versions_in(make_program(model, plan), steps))
    return Row(model, *layout, methods=(own, *methods), steps=steps, **options)


GPT, LLAMA = tiny(layers=4), tiny("llama", layers=4)
MIXED, TEXT, IMAGES = (resolve_model(f"own_models:{name}") for name in ("mixed", "text", "images"))
ROWS = (
    _row(GPT),
    _row(LLAMA, every=2),
    _row(GPT, "gpipe", pp=2, every=2),
    _row(LLAMA, "1f1b", pp=2, dp=2),
    _row(GPT, "breadth-first", pp=2, dp=2, loops=2, recompute="full"),
    _row(LLAMA, "depth-first", pp=2, loops=2, recompute="selective"),
    _row(GPT, "zb-h1", pp=2, every=2),
    _row(LLAMA, "zb-v", pp=2, loops=2),
    _row(GPT, "1f1b", pp=2, dp=2, methods=(Clips(),)),
    _row(LLAMA, "1f1b", pp=2, optimizer="lamb"),
    _row(divisible("bert", tied=True), "1f1b", pp=2),
    _row(divisible("vit"), "zb-h1", pp=2, every=2),
    _row(MIXED, "1f1b", pp=2, dp=2, every=2),
    _row(MIXED, "1f1b", pp=4, recompute="full"),
    _row(TEXT, "zb-h1", pp=2),
    _row(IMAGES, "gpipe", pp=2),
    # Work in bubbles: windows of several steps, whose first pieces are of the window before.
    _row(GPT, "gpipe", pp=2, bubbles=fills(), steps=5),
    _row(LLAMA, "1f1b", pp=4, bubbles=fills("official"), steps=6),
    _row(GPT, "1f1b", pp=2, dp=2, bubbles=fills(), steps=6, methods=(Clips(),)),
    _row(LLAMA, "breadth-first", pp=2, loops=2, bubbles=fills(), steps=7),
    _row(GPT, "zb-h1", pp=4, bubbles=fills(most_steps=4), steps=9),
    _row(MIXED, "1f1b", pp=4, bubbles=fills(), steps=6),
    _row(LLAMA, "zb-v", pp=2, loops=2, bubbles=fills(), steps=6, recompute="full"),
    _row(GPT, "1f1b", pp=2, dp=2, form="eigen", sharding="zero-1", every=2),
    _row(MIXED, "1f1b", pp=4, form="eigen", bubbles=fills(), steps=6),
    # Ranks that share a gradient; some weights and biases cross a border.
    _row(GPT, "1f1b", pp=2, dp=2, sharding="zero-1", every=2),
    _row(GPT, dp=4, sharding="zero-2", methods=(Clips(),)),
    _row(MIXED, "1f1b", pp=2, dp=2, sharding="zero-3"),
    _row(GPT, "1f1b", pp=2, dp=4, sharding="zero-2", island=2, bubbles=fills(), steps=6),
    _row(LLAMA, "breadth-first", pp=2, dp=2, loops=2, sharding="zero-3", bubbles=fills(), steps=6),
    _row(GPT, dp=2, sharding="zero-1", optimizer="muon"),
    _row(GPT, "chimera", pp=2, dp=2, every=2),
    _row(LLAMA, "chimera", pp=4, dp=2, micro_batches=8, bubbles=fills(), steps=6),
    # Tensor ranks, which exchange features of rows, and gather gradients.
    _row(divisible("gpt"), tp=2),
    _row(divisible("llama"), "1f1b", pp=2, tp=2, every=2),
    _row(divisible("bert"), dp=2, tp=2, methods=(Clips(),)),
    _row(divisible("vit", sequence=7), tp=2, recompute="full"),
    _row(divisible("gpt", sequence=7), "zb-h1", pp=2, tp=2, micro_batch_size=1, form="eigen"),
    _row(divisible("llama"), "1f1b", pp=2, dp=2, tp=2, sharding="zero-1", every=2),
    _row(divisible("bert"), dp=2, tp=2, sharding="zero-2", form="eigen", methods=(Clips(),)),
    _row(divisible("gpt"), "breadth-first", pp=2, dp=2, tp=2, sharding="zero-3", bubbles=fills(), steps=6),
    _row(divisible("gpt", heads=4), "1f1b", pp=2, tp=4, bubbles=fills(), steps=6),
    _row(divisible("llama"), "chimera", pp=2, dp=2, tp=2, bubbles=fills("official"), steps=6),
)
