"""Tied weights: copies on several stages get one gradient, and stay equal."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.tying import program
from weft.methods.tying.costs import COSTS
from weft.methods.tying.kinds import USES

BUNDLE = Bundle(name=program.NAME, parts=(program.PASS, *USES, *COSTS), runtime="weft.methods.tying.runtime")
