"""What the holders of copies of a weight do together."""

from __future__ import annotations

from weft.program.kinds import KINDS, Kind

REDUCE_TIED = KINDS.register(
    Kind(
        name="reduce_tied",
        symbol="T",
        stream="collective",
        reads=("weight_gradient",),
        writes=("reduced_gradient",),
        collective=True,
        spans_stages=True,
    )
)
