"""The obligation of a program to an auxiliary head: backward passes of its stage start from its loss.

The program gets no extra instruction. Forward passes of the stage compute the head's loss, and backward
passes start from it. The coefficient of the loss is known before the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.methods.auxiliary_head.kinds import HasHead, check_head
from weft.methods.auxiliary_head.layers import stage_with
from weft.methods.auxiliary_head.options import NAME, options_of
from weft.program.layout import PipelineLayout
from weft.program.passes import Pass

DIVIDED = "its head is whole on one rank, which ranks that divide layers or tokens do not have"


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The stage with the head, and the number of ranks that divide each of its replicas."""

    stage: int
    divided: int


def options(plan: Plan, graph: LayerGraph) -> HeadOptions | None:
    options = options_of(plan)
    if options is None:
        return None
    stage = stage_with(options.after_block, [one.layers for one in plan.stages])
    return HeadOptions(stage, plan.grid(stage).ranks)


def refuse(layout: PipelineLayout, head: HeadOptions, others: Mapping[str, Any]) -> list[Violation]:
    problems = [Violation(NAME, DIVIDED, "tp 1, cp 1")] if head.divided > 1 else []
    if head.stage < layout.frozen_stages:
        problems.append(Violation(NAME, f"stage {head.stage} is not trained, and its head would not be"))
    return problems


PASS = Pass(
    name=NAME,
    options=options,
    last=True,
    refuse=refuse,
    owes=lambda layout, head: HasHead(stage=head.stage),
    check=check_head,
)
