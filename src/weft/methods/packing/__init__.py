"""Packed samples: attention inside the documents of a sample (Krell et al., arXiv 2107.02027)."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.describe.plan import PACKING
from weft.methods.packing.rules import RULES

BUNDLE = Bundle(name=PACKING, parts=RULES, runtime="weft.methods.packing.runtime")
