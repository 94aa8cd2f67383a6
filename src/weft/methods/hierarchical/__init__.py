"""Hierarchical sums: replicas add up gradients inside their node first, then between nodes."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.hierarchical.options import NAME, SYNC
from weft.methods.hierarchical.rules import MOVES, RULES

BUNDLE = Bundle(name=NAME, parts=(SYNC, *RULES, *MOVES), runtime="weft.methods.hierarchical.runtime")
