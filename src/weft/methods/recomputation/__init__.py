"""Recomputation: backward passes run layers forward again, and fewer activations are kept."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.recomputation.costs import COSTS
from weft.methods.recomputation.moves import COMPOSITIONS, MOVES

BUNDLE = Bundle(
    name="recomputation",
    parts=(*COSTS, *COMPOSITIONS, *MOVES),
    runtime="weft.methods.recomputation.runtime",
)
