"""How early a reduction may start: gradients are reduced layer by layer while the backward pass goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from predict.cost.machines import CPU, MODEL, cluster
from predict.plans import plan_of

from weft.describe.cluster import Cluster, Link
from weft.describe.families import layer_graph
from weft.describe.plan import Blocking
from weft.methods.sharding.kinds import REDUCE
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.kinds import BACKWARD

GRAPH = layer_graph(MODEL)
SLOW_BYTES_PER_S, FAST_BYTES_PER_S = 1e6, 1e13


def joined_by(bytes_per_s: float) -> Cluster:
    """Two nodes of one device, and a link without latency."""
    return replace(cluster(nodes=2, devices=1), links={("node", "node"): Link(bytes_per_s, 0.0)})


def ticks(where: Cluster, blocking: tuple[Blocking, ...] = ()) -> tuple[np.ndarray, ...]:
    """Of two replicas of one stage: backward pass, reduction, its lead, and its rest; each of all ranks."""
    plan = plan_of(GRAPH, where, pp=1, dp=2, micro_batches=1).model_copy(update={"blocking": blocking})
    program = compile_plan(plan, GRAPH)
    model = CostModel(graph=GRAPH, cluster=where)
    costs, kind = price(model, program, plan).costs, program.columns.kind
    reduces = kind == REDUCE
    return (
        costs.occupancy[kind == BACKWARD],
        costs.occupancy[reduces],
        costs.lead[reduces],
        costs.rest[reduces],
    )


@pytest.mark.parametrize("bytes_per_s", [SLOW_BYTES_PER_S, FAST_BYTES_PER_S])
def test_all_but_the_last_layer_can_be_reduced_beside_the_backward_pass(bytes_per_s: float) -> None:
    backward, reduction, lead, rest = ticks(joined_by(bytes_per_s))
    assert ((reduction > backward) == (bytes_per_s == SLOW_BYTES_PER_S)).all()
    layers = len(GRAPH.layers)
    assert lead == pytest.approx((1.0 - 1.0 / layers) * np.minimum(backward, reduction), abs=1)
    assert rest == pytest.approx(reduction / layers, abs=1)


def test_a_device_that_computes_on_its_host_and_reductions_at_the_end_hide_nothing() -> None:
    where = joined_by(SLOW_BYTES_PER_S)
    on_hosts = replace(where, groups=(replace(where.groups[0], device=CPU),))
    for *_, lead, rest in (ticks(on_hosts), ticks(where, ("reductions",))):
        assert not lead.any()
        assert not rest.any()
