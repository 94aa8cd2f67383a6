"""Rows whose replicas share out what they step, all together or in islands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from equality_table import Row
from methods.rows.gradient_norm import Clips
from small_plans import tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.moves.layout import build_plan, flops_per_layer


def by_layout(row: Row) -> Plan:
    """As a planner's layout says it: layers of stages, shares of replicas and the order of devices."""
    layout = Layout(
        pp=row.pp,
        dp=row.dp,
        tp=row.tp,
        loops=row.loops,
        micro_batch_size=row.micro_batch_size,
        schedule=row.schedule,
        layers_per_stage=row.layers,
        micro_batches_per_replica=row.shares,
        rank_order=row.devices,
    )
    job = Job(
        graph=layer_graph(row.model),
        cluster=parse_cluster("4xa100-80gb"),
        global_batch=sum(row.shares) * layout.micro_batch_size,
        sequence=row.model.sequence,
        precision=row.precision,
    )
    return build_plan(job, layout, flops_per_layer(job)).model_copy(update=row.asked)


LEVELS = ("zero-0", "zero-1", "zero-2", "zero-3")
SHARED = partial(Row, precision="fp32", optimizer="adamw", steps=3, same_bits=True)
# Shares in which no parameter decays leave a group of the optimizer empty.
WIDE = replace(tiny("llama", layers=1), vocabulary=200)
IN_LINE = partial(SHARED, tiny(), "1f1b", pp=2, dp=2)
LOOPED = partial(Row, tiny(), "breadth-first", dp=4, loops=3, micro_batches=2, same_bits=True)
IN_PARTS = partial(Row, tiny(), "depth-first", dp=2, optimizer="adamw", steps=3)
ISLANDS = partial(Row, tiny(), micro_batches=2, island=2)
CLIPS = (Clips(),)

SAME_BITS = tuple(
    row(sharding=level)
    for row in (
        partial(SHARED, tiny(), dp=3, micro_batches=2),
        IN_LINE,
        partial(SHARED, tiny(), "breadth-first", dp=4, loops=4, micro_batches=2),
        partial(SHARED, tiny(), "depth-first", pp=2, dp=2, loops=2),
        partial(SHARED, tiny(), "zb-v", pp=2, dp=2, loops=2),
        partial(SHARED, tiny(), "chimera", pp=2),
        partial(SHARED, WIDE, dp=4, micro_batches=1),
        partial(IN_LINE, shares=(2, 5)),
        partial(SHARED, tiny(), "breadth-first", pp=2, dp=2, loops=2, shares=(4, 1)),
        partial(IN_LINE, layers=(5, 3), shares=(3, 1), devices=(2, 0, 3, 1), planned_by=by_layout),
        # Masters in fp32 of weights in bf16.
        partial(SHARED, tiny(), "breadth-first", dp=2, loops=4, recompute="full", precision="bf16"),
        partial(SHARED, tiny("llama"), "1f1b", pp=2, dp=2, precision="bf16"),
        partial(SHARED, tiny(), "zb-v", pp=2, dp=2, loops=2, precision="bf16"),
    )
    for level in LEVELS
)
# The sum of a gradient that is reduced in several parts has another order.
PARTS = tuple(
    row(sharding=level)
    for row in (partial(IN_PARTS, pp=2, loops=3), partial(IN_PARTS, loops=4, micro_batches=3))
    for level in ("zero-0", "zero-2", "zero-3")
)
ACROSS = (
    ISLANDS(dp=4, sharding="zero-1"),
    ISLANDS("breadth-first", dp=4, loops=3, sharding="zero-2", methods=CLIPS),
    ISLANDS("depth-first", dp=4, loops=4, sharding="zero-3"),
    ISLANDS("chimera", pp=2, dp=2, micro_batches=4, sharding="zero-3"),
    ISLANDS("chimera", pp=2, dp=2, micro_batches=4, sharding="zero-1", methods=CLIPS),
    *(
        LOOPED(precision=precision, sharding=level, island=2)
        for precision in ("fp32", "bf16")
        for level in LEVELS[1:]
    ),
)
# Each replica's gradient is rounded for the way, and the sum is in the order of the ranks.
REDUCED = tuple(
    row(sharding=level)
    for row in (
        partial(SHARED, tiny(), dp=3, micro_batches=2, reduce_precision="bf16"),
        partial(SHARED, tiny(), dp=2, reduce_precision="fp32"),
        partial(IN_LINE, reduce_precision="bf16"),
        partial(SHARED, tiny("llama"), "chimera", pp=2, reduce_precision="bf16"),
        partial(SHARED, tiny(), dp=4, micro_batches=1, precision="bf16", reduce_precision="bf16"),
        partial(SHARED, tiny(), dp=2, precision="bf16", reduce_precision="fp32"),
        partial(SHARED, tiny(), dp=2, precision="fp64", reduce_precision="fp32"),
    )
    for level in LEVELS
)
ROWS = (
    *SAME_BITS,
    *REDUCED,
    *(LOOPED(precision="fp32", sharding=level, island=2, reduce_precision="bf16") for level in LEVELS[1:]),
    *PARTS,
    *ACROSS,
    *(
        LOOPED(precision=precision, sharding="zero-3", island=size)
        for precision in ("fp32", "bf16")
        for size in (None, 4)
    ),
)
