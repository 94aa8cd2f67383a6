"""SDP4Bit: replicas that shard states send gradients and changes of weights in about four bits."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.sdp4bit.costs import COSTS
from weft.methods.sdp4bit.kinds import USES
from weft.methods.sdp4bit.options import NAME, SYNC
from weft.methods.sdp4bit.program import PASS
from weft.methods.sdp4bit.rules import MOVES, RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(PASS, SYNC, *USES, *COSTS, *RULES, *MOVES),
    runtime="weft.methods.sdp4bit.runtime",
)
