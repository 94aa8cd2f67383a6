"""GraphPipe: stages that form a graph, by search over a series-parallel tree (arXiv 2406.17145)."""
