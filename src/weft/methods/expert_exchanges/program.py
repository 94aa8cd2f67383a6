"""Exchanges of expert ranks as instructions: passes are cut before the experts of a mixture and behind them.

Rows of tokens go to the ranks of their experts and come back (Lepikhin et al., GShard, arXiv 2006.16668,
section 3.2). Their gradients go the same way, so each mixture has two borders in either pass. The first one
of a forward pass also gathers the counts of rows; the others reuse them.

Interleaved, two micro-batches take turns, so that one exchanges while the other computes (DeepSeek-V3, arXiv
2412.19437, section 3.2.1; `weft.program.passes.interleave`).
"""

from __future__ import annotations

from typing import Literal, get_args

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import EXPERT_BALANCE, EXPERT_EXCHANGES, Plan
from weft.methods.expert_exchanges.kinds import (
    EXPERT_COMBINE,
    EXPERT_COMBINE_BACKWARD,
    EXPERT_DISPATCH,
    EXPERT_DISPATCH_BACKWARD,
)
from weft.moves.cutting import Cutter
from weft.program.passes.cutting import CutOptions, cutting_pass
from weft.program.segments import Border, CutInSegments, StageSegments

NAME = EXPERT_EXCHANGES
Way = Literal["inside", "instructions", "interleaved"]
WAYS: tuple[Way, ...] = get_args(Way)

CUTTER = Cutter(name=NAME, axis="expert", ways=WAYS)


def options(plan: Plan, graph: LayerGraph) -> CutOptions | None:
    if not CUTTER.cuts(plan):
        return None
    stages = range(len(plan.stages))
    owed = CutInSegments(
        segments=tuple(_segments(plan, graph, stage) for stage in stages),
        grids=tuple(map(plan.grid, stages)),
        axis=CUTTER.axis,
    )
    return CutOptions(owed, CUTTER.way_of(plan) == "interleaved")


def _segments(plan: Plan, graph: LayerGraph, stage: int) -> StageSegments:
    shape = plan.shape(stage)
    rows, own = graph.amounts("dispatched", shape), graph.amounts("sent", shape)
    # Each tensor rank sends the rows of all tokens, also of those that the stream has elsewhere.
    tokens = [shape.sequence_parallel * one for one in own]
    forward: list[Border] = []
    backward: list[Border] = []
    for layer in plan.stages[stage].layers:
        if not rows[layer]:
            continue
        # If all choose them, a rank's experts get each token of all ranks as often as it may choose them.
        choices = min(rows[layer] / tokens[layer], graph.experts / plan.ep)
        sizes = (rows[layer], choices * plan.ep * tokens[layer])
        expected, most = (round(one) * plan.element_bytes for one in sizes)
        for kinds, borders in (
            ((EXPERT_DISPATCH, EXPERT_COMBINE), forward),
            ((EXPERT_DISPATCH_BACKWARD, EXPERT_COMBINE_BACKWARD), backward),
        ):
            borders += [Border(kind=kind, bytes=expected, most_bytes=most) for kind in kinds]
    return StageSegments(
        forward=tuple(forward), backward=tuple(backward), split=(False,) * (len(backward) + 1)
    )


# The methods before it look at forwards and backwards, and see whole passes.
PASS = cutting_pass(NAME, options, after=(EXPERT_BALANCE,))
