"""The default planner; see `weft.planning.planners.weft.planner`."""

from weft.planning.planners.weft.planner import WeftPlanner

__all__ = ["WeftPlanner"]
