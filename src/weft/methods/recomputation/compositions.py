"""What recomputation does not go with."""

from __future__ import annotations

from weft.describe.layout import Layout
from weft.moves.composition import Composition
from weft.moves.job import Job


def _unknown_products(job: Job, layout: Layout) -> str | None:
    if "selective" not in layout.recomputes or job.graph.knows_products:
        return None
    return "the model does not say what its products leave; nearest recompute: full"


COMPOSITIONS = (
    Composition(
        method="recomputation",
        other="models of others",
        reason="selective recomputation needs a model that says what its products leave",
        refuse=_unknown_products,
    ),
)
