"""The norm of the whole gradient; steps wait for it, to clip the gradient or to skip the step."""

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
