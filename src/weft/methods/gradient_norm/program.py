"""The norm of the whole gradient, taken by all ranks before any of them steps.

Clipping by the norm (Pascanu et al., arXiv 1211.5063) needs the gradients of all stages. So does a training
that skips steps with gradients that are not finite. After its last reduction, every training rank adds up its
own squares and exchanges one number with all others. Only then it steps: one more meeting per step.
"""

from __future__ import annotations

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.gradient_norm.kinds import NORM, TakesNorm
from weft.program.kinds import KINDS, is_any_of, kinds_writing
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.meeting import add_meeting, meeting_groups

NAME = "gradient-norm"

# One fp64 number: the sum of squares of a rank's part of the gradient.
NORM_BYTES = 8


def options(plan: Plan, graph: LayerGraph) -> bool | None:
    return plan.method(NAME) is not None or None


def take_norm(pipeline: LoweredPipeline, layout: PipelineLayout, options: bool) -> LoweredPipeline:
    """Add the norm to one pipeline: after the last reduction, before the first step."""
    read = {choice.value for read in KINDS[NORM].all_reads for choice in read.choices}
    reductions = kinds_writing(*read - {"weight_gradient"})
    reduced = np.flatnonzero(is_any_of(pipeline.columns.kind, reductions))
    return add_meeting(pipeline, NORM, NORM_BYTES, awaits=reduced, steps_wait=True)


PASS = Pass(
    name=NAME,
    options=options,
    apply=take_norm,
    after=("sharding", "tying", "blocking"),
    groups=lambda layout, options: meeting_groups(layout, NORM),
    owes=lambda layout, options: TakesNorm(),
)
