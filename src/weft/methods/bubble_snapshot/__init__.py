"""Copies for checkpoints in the bubbles of a pipeline: weights and optimizer states, piece by piece."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.bubble_snapshot.costs import COSTS
from weft.methods.bubble_snapshot.program import PASS, WORK
from weft.methods.bubble_snapshot.rules import RULES

BUNDLE = Bundle(
    name="bubble-snapshot",
    parts=(WORK, PASS, *COSTS, *RULES),
    runtime="weft.methods.bubble_snapshot.runtime",
)
