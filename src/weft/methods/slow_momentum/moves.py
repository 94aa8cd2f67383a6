"""The move to slow momentum."""

from __future__ import annotations

from weft.methods.local_averaging.moves import averaging_move
from weft.methods.slow_momentum.options import NAME

MOVES = (
    averaging_move(
        NAME,
        name="add slow momentum",
        summary="Replicas step by themselves; a step with momentum follows each average of their weights.",
        source="Wang et al., SlowMo, arXiv 1910.00643",
    ),
)
