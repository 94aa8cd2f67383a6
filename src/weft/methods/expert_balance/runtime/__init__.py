"""Expert balance on one rank: a root of every mixture, and the sums of counts over ranks."""

from __future__ import annotations

from weft.methods.expert_balance.options import NAME
from weft.methods.expert_balance.runtime.handlers import expert_counts, expert_loads
from weft.methods.expert_balance.runtime.routers import watch_routers
from weft.methods.expert_balance.runtime.state import ExpertBalance
from weft.run.methods import HandlerOf, StateOf
from weft.run.stage.stage_module import ChangedStageOf

PARTS = (
    ChangedStageOf(method=NAME, change=watch_routers),
    HandlerOf(kind="expert_counts", handler=expert_counts),
    HandlerOf(kind="expert_loads", handler=expert_loads),
    StateOf(method=NAME, make=ExpertBalance),
)
