"""The norm of the whole gradient, which steps wait for: to clip it, or to leave the step out."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.gradient_norm import program
from weft.methods.gradient_norm.costs import COSTS
from weft.methods.gradient_norm.kinds import USES
from weft.methods.gradient_norm.moves import MOVES

BUNDLE = Bundle(
    name=program.NAME,
    parts=(program.PASS, *USES, *COSTS, *MOVES),
    runtime="weft.methods.gradient_norm.runtime",
)
