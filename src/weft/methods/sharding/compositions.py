"""What sharing states out does not go with."""

from __future__ import annotations

from weft.describe.layout import Layout
from weft.moves.composition import Composition
from weft.moves.job import Job
from weft.moves.layout import replicas_of


def _nobody(job: Job, layout: Layout) -> str | None:
    if layout.sharding == "zero-0" or replicas_of(layout) > 1:
        return None
    return f"{layout.sharding} shares states out over replicas, and dp is 1; nearest sharding: zero-0"


COMPOSITIONS = (
    Composition(
        method="sharding",
        other="one replica",
        reason="there is nobody to share states with",
        refuse=_nobody,
    ),
)
