"""CLAN: replicas compress gradients in both directions, and keep the errors for the next step."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.clan.costs import COSTS
from weft.methods.clan.kinds import USES
from weft.methods.clan.options import NAME
from weft.methods.clan.pieces import SYNC
from weft.methods.clan.program import PASS
from weft.methods.clan.report import REPORT
from weft.methods.clan.rules import MOVES, RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(PASS, SYNC, *USES, *COSTS, *RULES, *MOVES, *REPORT),
    runtime="weft.methods.clan.runtime",
)
