"""Replicas that step by themselves, and average their weights every few steps."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.local_averaging.costs import COSTS
from weft.methods.local_averaging.moves import MOVES
from weft.methods.local_averaging.options import NAME, SYNC
from weft.methods.local_averaging.program import PASS
from weft.methods.local_averaging.report import REPORT
from weft.methods.local_averaging.rules import RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(PASS, SYNC, *COSTS, *RULES, *MOVES, *REPORT),
    runtime="weft.methods.local_averaging.runtime",
)
