"""The combinations that blocking communication refuses."""

from __future__ import annotations

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.moves.composition import Composition

# These levels reduce during the step, because they have no room for every gradient.
FEW_GRADIENTS = ("zero-2", "zero-3")


def _few_gradients(job: Job, layout: Layout) -> str | None:
    if layout.sharding not in FEW_GRADIENTS or "reductions" not in layout.blocking:
        return None
    return f"{layout.sharding} reduces gradients during the step, not at its end; nearest sharding: zero-1"


COMPOSITIONS = (
    Composition(
        method="blocking",
        other="sharding",
        reason="zero-2 and zero-3 reduce gradients during the step and have no room for all at its end",
        refuse=_few_gradients,
    ),
)
