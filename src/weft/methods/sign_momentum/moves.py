"""The move to sign momentum."""

from __future__ import annotations

from weft.methods.local_averaging.moves import averaging_move
from weft.methods.sign_momentum.options import NAME

MOVES = (
    averaging_move(
        NAME,
        name="step outside by signs",
        summary="Replicas step by themselves; a step by the sign of a momentum follows each average.",
        source="Distributed Sign Momentum with Local Steps for Training Transformers, arXiv 2411.17866",
    ),
)
