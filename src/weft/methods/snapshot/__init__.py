"""Copies for checkpoints in the bubbles of a pipeline: weights and optimizer states, piece by piece."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.snapshot.costs import COSTS
from weft.methods.snapshot.program import NAME, PASS, WORK
from weft.methods.snapshot.rules import RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(WORK, PASS, *COSTS, *RULES),
    runtime="weft.methods.snapshot.runtime",
)
