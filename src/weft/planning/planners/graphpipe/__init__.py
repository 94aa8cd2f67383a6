"""GraphPipe: stages that form a graph, by search over a series-parallel tree (arXiv 2406.17145)."""

from weft.planning.planners.graphpipe.planner import GraphPipePlanner

__all__ = ["GraphPipePlanner"]
