"""Sums over whole parameter tensors, which optimizers like LAMB need where ranks step shards of them."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.tensor_norms import program
from weft.methods.tensor_norms.costs import COSTS
from weft.methods.tensor_norms.kinds import NAME, USES

BUNDLE = Bundle(name=NAME, parts=(program.PASS, *USES, *COSTS), runtime="weft.methods.tensor_norms.runtime")
