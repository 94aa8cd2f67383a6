"""Held-out losses in the bubbles of a pipeline: forward passes with a copy of one step's weights."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.evaluate.costs import COSTS
from weft.methods.evaluate.program import PASS, WORK
from weft.methods.evaluate.rules import RULES
from weft.methods.evaluate.sizes import NAME

BUNDLE = Bundle(
    name=NAME,
    parts=(WORK, PASS, *COSTS, *RULES),
    runtime="weft.methods.evaluate.runtime",
)
