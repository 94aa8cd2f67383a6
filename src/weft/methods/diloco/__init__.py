"""DiLoCo: an outer step of Nesterov descent after every round of local steps."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.diloco.moves import MOVES
from weft.methods.diloco.options import NAME, SYNC

BUNDLE = Bundle(name=NAME, parts=(SYNC, *MOVES), runtime="weft.methods.diloco.runtime")
