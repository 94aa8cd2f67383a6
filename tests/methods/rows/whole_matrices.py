"""Rows of Muon, which needs whole matrices, of which ranks may have pieces."""

from __future__ import annotations

from functools import partial

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
    # Replicas that step by themselves.
    MUON(tiny(), dp=2, steps=4, methods=(Averages(2),)),
)
