"""Distributed sign momentum: an outer step of signs after every round of local steps."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.sign_momentum.moves import MOVES
from weft.methods.sign_momentum.options import NAME, SYNC

BUNDLE = Bundle(name=NAME, parts=(SYNC, *MOVES), runtime="weft.methods.sign_momentum.runtime")
