"""Whole matrices for optimizers like Muon, where ranks step shards of them."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.whole_matrices import program
from weft.methods.whole_matrices.costs import COSTS
from weft.methods.whole_matrices.kinds import NAME, USES
from weft.methods.whole_matrices.rules import RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(program.PASS, *USES, *COSTS, *RULES),
    runtime="weft.methods.whole_matrices.runtime",
)
