"""Methods that jobs of tests ask for. No torch here."""

from __future__ import annotations

from weft.describe.plan import GRADIENT_NORM, MICRO_BATCH_NORMS, Choice
from weft.methods.lora.options import Base, low_rank_choice

CLIPS = (Choice(name=GRADIENT_NORM),)
TELLS_NORMS = (Choice(name=MICRO_BATCH_NORMS),)


def with_head(after_block: int, weight: float = 0.3) -> Choice:
    return Choice(name="auxiliary-head", options={"after_block": after_block, "weight": weight})


def with_low_rank(
    rank: int = 4, alpha: float = 8.0, *targets: str, base: Base | None = None, dropout: float = 0.0
) -> Choice:
    return low_rank_choice(rank, alpha, targets, base=base, dropout=dropout)
