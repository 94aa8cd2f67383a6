"""What replicas that share out states do together, and the room they give back."""

from __future__ import annotations

from weft.program.kinds import KINDS, Kind

GATHER = KINDS.register(
    Kind(
        name="gather",
        symbol="G",
        stream="collective",
        reads=("shard",),
        writes=("weights",),
        collective=True,
    )
)
FREE = KINDS.register(Kind(name="free", symbol="f", stream="compute", reads=("weights",)))
REDUCE = KINDS.register(
    Kind(
        name="reduce",
        symbol="R",
        stream="collective",
        reads=("weight_gradient",),
        writes=("reduced_gradient",),
        collective=True,
    )
)
REDUCE_ACROSS = KINDS.register(
    Kind(
        name="reduce_across",
        symbol="RA",
        stream="collective",
        reads=("reduced_gradient",),
        writes=("reduced_gradient",),
        collective=True,
    )
)
