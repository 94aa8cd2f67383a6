"""Operators placed on the devices one has (Baechi, SoCC 2020), and pipelined over their places."""

from weft.planning.planners.baechi.planner import BAECHI_PLANNER, PlacementPlanner

__all__ = ["BAECHI_PLANNER", "PlacementPlanner"]
