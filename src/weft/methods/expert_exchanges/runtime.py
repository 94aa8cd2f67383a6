"""The exchanges of expert ranks at the borders between segments."""

from __future__ import annotations

from collections.abc import Sequence

from weft.describe.plan import Choice, expert_ranks_per_node
from weft.methods.expert_exchanges.program import NAME
from weft.run.handlers.segments import cross_backward, cross_forward
from weft.run.methods import HandlerOf
from weft.run.stage.expert_pieces import ExpertCut
from weft.run.stage.pieces import CutOf
from weft.run.stage.stage_module import ChangedStageOf, StageModule


def _exchange_by_node(stage: StageModule, layers: Sequence[int], choice: Choice) -> None:
    stage.expert.per_node = expert_ranks_per_node(choice)


PARTS = (
    ChangedStageOf(method=NAME, change=_exchange_by_node),
    CutOf(method=NAME, cut=ExpertCut.of),
    HandlerOf(kind="expert_dispatch", handler=cross_forward),
    HandlerOf(kind="expert_combine", handler=cross_forward),
    HandlerOf(kind="expert_combine_backward", handler=cross_backward),
    HandlerOf(kind="expert_dispatch_backward", handler=cross_backward),
)
