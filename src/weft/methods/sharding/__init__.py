"""Sharding of optimizer states, gradients and weights over replicas, instead of full copies (ZeRO)."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.sharding import program
from weft.methods.sharding.costs import COSTS
from weft.methods.sharding.kinds import USES
from weft.methods.sharding.moves import MOVES
from weft.methods.sharding.rules import RULES

BUNDLE = Bundle(
    name=program.NAME,
    parts=(program.PASS, *USES, *COSTS, *RULES, *MOVES),
    runtime="weft.methods.sharding.runtime",
)
