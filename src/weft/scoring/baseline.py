"""A prediction that knows nothing of layouts, which a cost model has to beat to be worth anything.

A step takes 6 operations per parameter and token at 45 % of the peaks of all devices: what people reckon with
on paper.
"""

from __future__ import annotations

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan

NAME = "6N at 45 %"
FLOPS_PER_PARAMETER = 6
UTILISATION = 0.45


def plain_step_s(plan: Plan, graph: LayerGraph, cluster: Cluster) -> float:
    """Seconds of a step whose devices have the plan's precision."""
    flops = FLOPS_PER_PARAMETER * graph.parameters() * plan.global_batch * plan.sequence
    peak = sum(cluster.device_of(rank).flops_per_s[plan.precision] for rank in range(plan.ranks))
    return flops / (UTILISATION * peak)
