"""PowerSGD: replicas send low-rank factors of the matrices of their gradients."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.power_sgd.costs import COSTS
from weft.methods.power_sgd.options import NAME
from weft.methods.power_sgd.rules import MOVES, RULES
from weft.methods.power_sgd.traffic import SYNC

BUNDLE = Bundle(
    name=NAME,
    parts=(SYNC, *COSTS, *RULES, *MOVES),
    runtime="weft.methods.power_sgd.runtime",
)
