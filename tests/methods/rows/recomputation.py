"""Rows that recompute layers: to the bits of one process, which keeps everything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from equality_table import Row
from small_plans import divisible, tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan import RECOMPUTES, Plan
from weft.describe.request import request_of
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.weft import WeftPlanner
from weft.planning.problem import measured_problem


def by_planner(row: Row) -> Plan:
    """What the planner finds on devices with three quarters of the memory to recompute nothing."""
    sizes = {"pp": row.pp, "dp": row.dp, "micro_batch_size": row.micro_batch_size, "schedule": row.schedule}
    pins = PartialLayout(tp=1, sharding="zero-0", **sizes)
    cluster = parse_cluster(f"{row.pp * row.dp}xv100-16gb")
    batch = row.dp * row.micro_batches * row.micro_batch_size
    request = request_of(
        row.model, cluster, global_batch=batch, precision=row.precision, pins=pins, memory_risk=0.5
    )
    problem = measured_problem(request)
    [group] = cluster.groups
    taken = group.device.memory_bytes - group.device.usable_bytes
    memory = round(0.75 * Bounds(problem).holding(Layout(loops=1, **sizes)).total) + taken
    # A stated reserve has room for communicators.
    device = replace(group.device, memory_bytes=memory, reserve_bytes=taken)
    tight = replace(cluster, groups=(replace(group, device=device),))
    problem = replace(problem, job=replace(problem.job, cluster=tight))
    plan = WeftPlanner().search(problem).fitting[0].plan
    assert plan is not None
    assert tuple(stage.recompute for stage in plan.stages) == row.recompute
    return plan


DROPS = partial(Row, precision="fp32", dropout=0.3, same_bits=True)
BERT = partial(DROPS, tiny("bert"), "1f1b", pp=2)
LLAMA = partial(Row, tiny("llama"), pp=2, precision="fp32", same_bits=True)
UNEVEN = partial(DROPS, tiny(), pp=2, layers=(3, 5))
PLANNED = partial(Row, tiny("llama", layers=8), "1f1b", planned_by=by_planner)
DIVIDED = partial(Row, divisible("gpt"), tp=2)
ROWS = (
    *(
        DROPS(tiny(), schedule, pp=2, dp=dp, loops=loops, recompute=recompute)
        for schedule, dp, loops in (
            ("gpipe", 1, 1),
            ("1f1b", 2, 1),
            ("breadth-first", 1, 2),
            ("depth-first", 1, 2),
            ("zb-h1", 1, 1),
            ("zb-v", 1, 2),
            ("chimera", 1, 1),
        )
        for recompute in ("none", "full")
    ),
    *(
        row(recompute=recompute)
        for row in (partial(LLAMA, "1f1b"), partial(LLAMA, "zb-v", loops=2), BERT)
        for recompute in RECOMPUTES
    ),
    DROPS(tiny(), "zb-h1", pp=2, recompute="selective"),
    *(
        UNEVEN(schedule, recompute=recompute)
        for schedule in ("1f1b", "zb-h1")
        for recompute in ("none", ("full", "none"), ("none", "full"))
    ),
    Row(tiny("llama"), "1f1b", pp=4, recompute="full"),
    Row(tiny("llama"), "zb-h1", pp=2, dp=2, recompute="full"),
    PLANNED(pp=4, recompute=("full", "selective", "none", "none")),
    PLANNED(pp=2, dp=2, recompute=("full", "selective")),
    # Layers that are run again exchange again.
    DIVIDED(recompute="full"),
    DIVIDED("zb-h1", recompute="full"),
    DIVIDED("1f1b", recompute="selective"),
)
