"""CSER: replicas apply whole updates, send parts of them, and reset the error by averaging a part of it."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.cser.costs import COSTS
from weft.methods.cser.options import NAME
from weft.methods.cser.program import PASS
from weft.methods.cser.report import REPORT
from weft.methods.cser.rules import MOVES, RULES
from weft.methods.cser.traffic import SYNC

BUNDLE = Bundle(
    name=NAME,
    parts=(PASS, SYNC, *COSTS, *RULES, *MOVES, *REPORT),
    runtime="weft.methods.cser.runtime",
)
