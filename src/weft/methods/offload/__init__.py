"""Offload: optimizer states and activations wait in host memory while the device does not need them."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.describe.relief import Relief
from weft.methods.offload import program
from weft.methods.offload.costs import COSTS
from weft.methods.offload.kinds import USES
from weft.methods.offload.moves import MOVES
from weft.methods.offload.options import NAME, TABLE
from weft.methods.offload.rules import RULES

RELIEF = Relief(
    words="[offload] states = true, activations = true, through host memory",
    keys={NAME: {"states": True, "activations": True}},
)

BUNDLE = Bundle(
    name=NAME,
    parts=(program.PASS, TABLE, *USES, *COSTS, *RULES, *MOVES, RELIEF),
    runtime="weft.methods.offload.runtime",
)
