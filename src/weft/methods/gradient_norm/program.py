"""The norm of the whole gradient, taken by all ranks before any of them steps.

Clipping by the norm (Pascanu et al., arXiv 1211.5063) needs the gradients of all stages. So does a training
that skips steps with gradients that are not finite. After its last reduction, every training rank adds up its
own squares and exchanges one number with all others. Only then it steps: one more meeting per step. If
replicas step by themselves, the ranks of each replica meet, and the norm is that of its own gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import Violation
from weft.methods.gradient_norm.kinds import NORM, TakesNorm
from weft.program.kinds import KINDS, is_any_of, kinds_writing
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.meeting import add_meeting, meeting_groups

NAME = "gradient-norm"

# One fp64 number: the sum of squares of a rank's part of the gradient.
NORM_BYTES = 8


@dataclass(frozen=True, slots=True)
class NormOptions:
    """The replicas whose gradient a norm is of: all together, or each by itself."""

    by_replica: bool = False


def options(plan: Plan, graph: LayerGraph) -> NormOptions | None:
    return NormOptions(keeps_gradients_local(plan.sync)) if plan.method(NAME) is not None else None


def refuse(layout: PipelineLayout, options: NormOptions, others: Mapping[str, Any]) -> list[Violation]:
    """Refuse norms of single replicas where a rank holds stages of several."""
    if not options.by_replica or layout.paths == 1:
        return []
    problem = "a rank holds stages of several replicas, whose norms are taken apart"
    return [Violation(NAME, f"{layout.paths} paths: {problem}")]


def take_norm(pipeline: LoweredPipeline, layout: PipelineLayout, options: NormOptions) -> LoweredPipeline:
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
    deals=True,
    mixes_lanes=True,
    mixes_replicas=True,
    refuse=refuse,
    groups=lambda layout, options: meeting_groups(layout, NORM, by_replica=options.by_replica),
    owes=lambda layout, options: TakesNorm(),
)
