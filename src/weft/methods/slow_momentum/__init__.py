"""Slow momentum: an outer step with momentum after every round of local steps."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.slow_momentum.moves import MOVES
from weft.methods.slow_momentum.options import NAME, SYNC

BUNDLE = Bundle(name=NAME, parts=(SYNC, *MOVES), runtime="weft.methods.slow_momentum.runtime")
