"""Rows whose copies of a tied embedding train like one weight."""

from __future__ import annotations

from functools import partial

from equality_table import Row
from small_plans import tiny

GPT, LLAMA = (partial(Row, tiny(family, tied=True), steps=3) for family in ("gpt", "llama"))
ROWS = (
    GPT("1f1b", pp=2, dp=2),
    GPT("breadth-first", loops=2),
    LLAMA("breadth-first", pp=2, dp=2, loops=2),
    LLAMA("zb-h1", pp=2),
    GPT("zb-v", pp=2, loops=2),
    GPT("chimera", pp=2, dp=2),
    # Copies stay whole where states are shared out.
    GPT("1f1b", pp=2, dp=2, sharding="zero-1"),
    GPT("breadth-first", pp=2, dp=2, loops=2),
    GPT("breadth-first", pp=2, dp=2, loops=2, sharding="zero-2"),
    GPT("breadth-first", pp=2, dp=2, loops=2, sharding="zero-3"),
    # On one stage.
    Row(tiny(tied=True), dp=2),
    Row(tiny(tied=True), "zb-h1"),
)
