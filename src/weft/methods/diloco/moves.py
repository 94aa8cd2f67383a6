"""The move to DiLoCo."""

from __future__ import annotations

from weft.methods.diloco.options import NAME
from weft.methods.local_averaging.moves import averaging_move

MOVES = (
    averaging_move(
        NAME,
        name="step outside with Nesterov",
        summary="Replicas step by themselves; a Nesterov step follows each average of their weights.",
        source="Douillard et al., DiLoCo, arXiv 2311.08105",
    ),
)
