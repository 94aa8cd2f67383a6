"""AMP: search of tensor-, data- and pipeline-parallel strategies by a closed form (arXiv 2210.07297)."""

from weft.planning.planners.amp.inputs import AmpInputs, Degrees, degrees_of, slower_of_both
from weft.planning.planners.amp.planner import AmpPlanner, AmpStrategy, amp_search, amp_strategy

__all__ = [
    "AmpInputs",
    "AmpPlanner",
    "AmpStrategy",
    "Degrees",
    "amp_search",
    "amp_strategy",
    "degrees_of",
    "slower_of_both",
]
