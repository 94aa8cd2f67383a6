"""Held-out losses in the bubbles of a pipeline: forward passes with a copy of one step's weights."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.bubble_evaluation.costs import COSTS
from weft.methods.bubble_evaluation.program import PASS, WORK
from weft.methods.bubble_evaluation.rules import RULES
from weft.methods.bubble_evaluation.sizes import NAME

BUNDLE = Bundle(
    name="bubble-evaluation",
    parts=(WORK, PASS, *COSTS, *RULES),
    runtime="weft.methods.bubble_evaluation.runtime",
)
__all__ = ["BUNDLE", "NAME"]
