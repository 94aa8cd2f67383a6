"""The rules that refuse loss kernels: heads without a vocabulary, and a fused kernel for its share."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.loss_choice import BY_SIZE, FUSED, WHOLE
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanRule
from weft.errors import Violation
from weft.methods.loss_kernels.costs import refuse, refuse_fused_job
from weft.moves.composition import Composition
from weft.run.supported import NeededPackage

DIVIDED = "the fused kernel needs all columns of the vocabulary, and tensor ranks divide them"


def _of_layout(job: Job, layout: Layout) -> str | None:
    if layout.loss_chunk_tokens is not None and layout.loss != "chunked":
        return f"loss chunk tokens {layout.loss_chunk_tokens} with loss {layout.loss}; nearest loss: chunked"
    if layout.loss == WHOLE:
        return None
    if (reason := refuse(job.graph.layers[-1], BY_SIZE)) is not None or layout.loss != "fused":
        return reason
    return refuse_fused_job(job) or _divided(layout)


def _divided(layout: Layout) -> str | None:
    return f"{DIVIDED}; nearest loss: chunked" if layout.tp > 1 else None


def _of_plan(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    fused = any(choice.name == FUSED for choice in plan.layer_choices)
    if fused and max(plan.tensor_degrees) > 1:
        yield Violation("plan: mesh.tp", DIVIDED, "1")


RULES = (
    Composition(
        method="loss kernels",
        other="other heads, tensor parallelism, CPUs",
        reason="kernels multiply tokens with a vocabulary; the fused one needs all of it, and a GPU",
        refuse=_of_layout,
    ),
    PlanRule(refuse=_of_plan),
    NeededPackage(choice=FUSED, package="liger_kernel", extra="liger"),
)
