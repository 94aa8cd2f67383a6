"""Rows whose copies of a tied embedding train like one weight."""

from __future__ import annotations

from functools import partial

from equality_table import Row
from methods.rows.gradient_norm import Clips
from small_plans import divisible, tiny

CLIPS = (Clips(),)
GPT, LLAMA = (partial(Row, tiny(family, tied=True), steps=3) for family in ("gpt", "llama"))
WIDE = partial(Row, divisible("llama", tied=True), steps=3)
ROWS = (
    GPT("1f1b", pp=2, dp=2),
    GPT("breadth-first", loops=2),
    LLAMA("breadth-first", pp=2, dp=2, loops=2),
    LLAMA("zb-h1", pp=2),
    GPT("zb-v", pp=2, loops=2),
    GPT("chimera", pp=2, dp=2),
    # Replicas share copies out with the rest of their stages, which cut the weight at other elements.
    GPT("1f1b", pp=2, dp=2, sharding="zero-1"),
    GPT("breadth-first", pp=2, dp=2, loops=2),
    *(GPT("breadth-first", pp=2, dp=2, loops=2, sharding=level) for level in ("zero-1", "zero-2", "zero-3")),
    GPT("depth-first", pp=2, dp=2, loops=2, sharding="zero-3"),
    GPT("1f1b", pp=2, dp=4, micro_batches=1, layers=(1, 7), sharding="zero-3", methods=CLIPS),
    LLAMA("zb-v", pp=2, dp=2, loops=2, sharding="zero-2", methods=CLIPS),
    LLAMA("chimera", pp=2, dp=2, sharding="zero-3", methods=CLIPS),
    GPT("1f1b", pp=2, dp=4, micro_batches=1, sharding="zero-3", island=2, methods=CLIPS),
    GPT("chimera", pp=2, dp=2, sharding="zero-1", island=2, methods=CLIPS),
    LLAMA("1f1b", pp=2, dp=2, cp=2, sharding="zero-2"),
    WIDE("1f1b", pp=2, dp=2, tp=2, sharding="zero-3", methods=CLIPS),
    # Copies have the same bits, whatever is rounded on the way.
    GPT("1f1b", pp=2, dp=2, sharding="zero-3", precision="fp32", reduce_precision="bf16", tolerance=0.2),
    GPT("zb-v", pp=2, dp=2, loops=2, sharding="zero-3", precision="bf16", tolerance=0.1),
    GPT("1f1b", pp=2, dp=3, micro_batches=2, sharding="zero-3", optimizer="adamw", evaluates=True),
    # Sums over whole tensors would add up other pieces of each copy, so copies are whole.
    GPT("1f1b", pp=2, dp=2, sharding="zero-3", optimizer="lamb"),
    # On one stage.
    Row(tiny(tied=True), dp=2),
    Row(tiny(tied=True), "zb-h1"),
)
