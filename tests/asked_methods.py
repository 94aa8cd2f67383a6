"""Methods that jobs of tests ask for. No torch here."""

from __future__ import annotations

from weft.describe.plan import GRADIENT_NORM, MICRO_BATCH_NORMS, Choice

CLIPS = (Choice(name=GRADIENT_NORM),)
TELLS_NORMS = (Choice(name=MICRO_BATCH_NORMS),)


def with_head(after_block: int, weight: float = 0.3) -> Choice:
    return Choice(name="auxiliary-head", options={"after_block": after_block, "weight": weight})
