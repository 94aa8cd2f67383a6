"""The norms of a step's micro-batches, combined by all training ranks after the last backward pass.

Every rank adds up the squares of its part of each micro-batch's gradient while it computes. One meeting per
step adds up the squares of all stages, replicas and ranks. No step waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.methods.micro_batch_norms.kinds import MICRO_BATCH_NORMS, TellsNorms
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.meeting import add_meeting, meeting_groups

NAME = "micro-batch-norms"

# One fp64 number per micro-batch: a sum of squares.
SQUARE_BYTES = 8


def options(plan: Plan, graph: LayerGraph) -> bool | None:
    return plan.method(NAME) is not None or None


def refuse(layout: PipelineLayout, options: bool, others: Mapping[str, Any]) -> list[Violation]:
    found = []
    if "tying" in others:
        problem = "stages with copies of one weight see parts of its gradient, of which no square adds up"
        found.append(Violation(NAME, f"{problem}; leave report.micro_batch_norms out, or train with pp 1"))
    if (layout.splits > 1).any():
        problem = "stages that split micro-batches see gradients of parts; leave report.micro_batch_norms out"
        found.append(Violation(NAME, problem))
    return found


def tell_norms(pipeline: LoweredPipeline, layout: PipelineLayout, options: bool) -> LoweredPipeline:
    """Add the norms to one pipeline; no step waits for them."""
    exchanged = SQUARE_BYTES * sum(layout.micro_batches)
    return add_meeting(pipeline, MICRO_BATCH_NORMS, exchanged, steps_wait=False)


PASS = Pass(
    name=NAME,
    options=options,
    apply=tell_norms,
    last=True,
    deals=True,
    refuse=refuse,
    groups=lambda layout, options: meeting_groups(layout, MICRO_BATCH_NORMS),
    owes=lambda layout, options: TellsNorms(),
)
