"""What all ranks that step do together, before any of them does."""

from __future__ import annotations

from weft.program.kinds import KINDS, Kind

NORM = KINDS.register(
    Kind(
        name="norm",
        symbol="N",
        stream="collective",
        reads=("reduced_gradient",),
        writes=("gradient_norm",),
        collective=True,
        spans_stages=True,
    )
)
