"""Rows of Muon, which needs whole matrices, of which ranks may have pieces."""

from __future__ import annotations

from functools import partial

from decoder_models import tiny_decoder
from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.local_averaging import Averages
from small_plans import divisible, tiny

MUON = partial(Row, optimizer="muon", steps=3)
CLIPPED = partial(MUON, methods=(Clips(),))
ROWS = (
    MUON(tiny()),
    MUON(tiny(), dp=2),
    MUON(tiny("llama"), "1f1b", pp=2, dp=2, layers=(5, 3), shares=(2, 5)),
    MUON(tiny(), "breadth-first", pp=2, dp=2, loops=2),
    MUON(tiny(tied=True), "zb-h1", pp=2),
    MUON(tiny(), "chimera", pp=2),
    # Masters in fp32.
    MUON(tiny("llama"), "1f1b", pp=2, dp=2, precision="bf16", same_bits=True),
    CLIPPED(tiny(tied=True), "1f1b", pp=2, dp=2),
    CLIPPED(divisible("bert"), cp=2, loss="tokens"),
    # Matrices across the borders of shards, and one that several ranks have pieces of.
    *(MUON(tiny(), dp=3, micro_batches=2, sharding=level) for level in ("zero-1", "zero-2", "zero-3")),
    MUON(tiny(layers=1), dp=8, micro_batches=1, sharding="zero-1"),
    MUON(tiny("llama"), "1f1b", pp=2, dp=2, layers=(5, 3), shares=(2, 5), sharding="zero-1"),
    MUON(tiny(tied=True), "breadth-first", pp=2, dp=2, loops=2, sharding="zero-2"),
    MUON(tiny(), "zb-v", pp=2, dp=2, loops=2, sharding="zero-3"),
    MUON(tiny(), "chimera", pp=2, dp=2, sharding="zero-3", island=2),
    MUON(tiny(), micro_batches=2, dp=4, sharding="zero-1", island=2),
    MUON(tiny("llama"), "1f1b", pp=2, dp=2, sharding="zero-1", precision="bf16", same_bits=True),
    CLIPPED(tiny(tied=True), "1f1b", pp=2, dp=2, sharding="zero-1"),
    MUON(divisible("gpt"), cp=2, dp=2, sharding="zero-1", loss="tokens"),
    # Experts are stacks of matrices, of which expert ranks have some.
    MUON(tiny_decoder("mixtral"), dp=2, sharding="zero-1"),
    MUON(tiny_decoder("mixtral"), ep=2, dp=2, sharding="zero-1"),
    # Replicas that step by themselves.
    MUON(tiny(), dp=2, steps=4, methods=(Averages(2),)),
)
