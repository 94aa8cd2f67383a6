"""Small plans in front of moves."""

from __future__ import annotations

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.moves.layout import build_plan, flops_per_layer
from weft.moves.move import Context


def context(
    *,
    pp: int = 2,
    dp: int = 2,
    micro_batch_size: int = 2,
    schedule: str = "1f1b",
    loops: int = 1,
    tp: int = 1,
) -> Context:
    """A plan of gpt-1m on eight devices, 16 samples per step."""
    graph = layer_graph(resolve_model("gpt-1m"))
    job = Job(graph=graph, cluster=parse_cluster("8xa100-80gb"), global_batch=16, sequence=256)
    layout = Layout(
        pp=pp,
        dp=dp,
        tp=tp,
        loops=loops,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
    )
    return Context(plan=build_plan(job, layout, flops_per_layer(job)), graph=graph, cluster=job.cluster)
