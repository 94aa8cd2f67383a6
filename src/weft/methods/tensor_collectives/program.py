"""Collectives of tensor ranks as instructions: passes are cut where ranks exchange.

Under tensor parallelism a layer exchanges at the borders of a region of divided products. If ranks divide the
tokens between regions, each border is a collective in both passes. It gathers where a pass enters a region,
and reduce-scatters where a pass leaves one. Otherwise both passes all-reduce where they leave a region, and
exchange nothing where they enter one.

Overlapped, a region's backward pass is split: its input's gradient is exchanged while gradients of its
weights are computed. Shoeybi et al. (Megatron-LM, arXiv 1909.08053) do so within one product.
Interleaved, two micro-batches take turns, segment by segment (`weft.program.passes.interleave`).
"""

from __future__ import annotations

from typing import Literal, get_args

from weft.describe.layer_graph import LayerGraph
from weft.describe.layer_pieces import TensorBorder, cut_of
from weft.describe.plan import EXPERT_BALANCE, Plan
from weft.errors import InputError
from weft.methods.tensor_collectives.kinds import TENSOR_BACKWARD, TENSOR_FORWARD
from weft.moves.cutting import Cutter
from weft.program.passes.cutting import CutOptions, cutting_pass
from weft.program.segments import Border, CutInSegments, StageSegments

NAME = "tensor-collectives"
Way = Literal["inside", "instructions", "overlapped", "interleaved"]
WAYS: tuple[Way, ...] = get_args(Way)

TOKENS = "context ranks exchange inside of the segments, which nothing predicts"
CUTTER = Cutter(name=NAME, axis="tensor", ways=WAYS, apart={"context": TOKENS})


def stage_borders(plan: Plan, graph: LayerGraph, stage: int) -> list[TensorBorder]:
    """Return all borders of a stage's layers, in the order of its forward pass."""
    return [border for layer in plan.stages[stage].layers for border in cut_of(graph.layers[layer]).borders]


def crossed(enters: bool, *, divides_sequence: bool, backward: bool) -> bool:
    """Return True if ranks exchange where a pass crosses such a border."""
    return divides_sequence or enters == backward


def options(plan: Plan, graph: LayerGraph) -> CutOptions | None:
    if not CUTTER.cuts(plan):
        return None
    if problems := CUTTER.problems_of(plan, graph):
        raise InputError(problems)
    way, stages = CUTTER.way_of(plan), range(len(plan.stages))
    owed = CutInSegments(
        segments=tuple(_segments(plan, graph, stage, way) for stage in stages),
        grids=tuple(map(plan.grid, stages)),
        axis=CUTTER.axis,
    )
    return CutOptions(owed, way == "interleaved")


def _segments(plan: Plan, graph: LayerGraph, stage: int, way: str) -> StageSegments:
    shape = plan.shape(stage)
    if shape.tensor_parallel == 1:
        return StageSegments()
    divides = shape.sequence_parallel > 1
    forward: list[Border] = []
    backward: list[Border] = []
    splits = [False]
    for one in stage_borders(plan, graph, stage):
        size = round(one.elements(shape)) * plan.element_bytes
        if crossed(one.enters, divides_sequence=divides, backward=False):
            forward.append(Border(kind=TENSOR_FORWARD, bytes=size, most_bytes=size))
        if crossed(one.enters, divides_sequence=divides, backward=True):
            backward.append(Border(kind=TENSOR_BACKWARD, bytes=size, most_bytes=size))
            # The segment after a region's entry holds the region; the exchange awaits only its input part.
            splits.append(way == "overlapped" and one.enters)
    return StageSegments(forward=tuple(forward), backward=tuple(backward), split=tuple(splits))


# The methods before it look at forwards and backwards, and see whole passes.
PASS = cutting_pass(
    NAME, options, after=("auxiliary-head", EXPERT_BALANCE, "local-averaging", "micro-batch-norms")
)
