"""Islands on nodes gather over fast links; what they add up across nodes shares the slow ones."""

from __future__ import annotations

import numpy as np
import pytest
from asked_methods import CLIPS
from predict.cost.machines import MODEL, cluster
from predict.plans import plan_of

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Plan, Sharding
from weft.methods.gradient_norm.kinds import NORM
from weft.methods.sharding.kinds import GATHER, REDUCE, REDUCE_ACROSS
from weft.planning.compile import compile_plan
from weft.predict.cost.memory import resident_states, stage_parameters, state_bytes, with_slack
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict
from weft.program.kinds import STEP

GRAPH = layer_graph(MODEL)


def islands(where: Cluster, island: int | None, sharding: Sharding = "zero-3", **sizes: object) -> Plan:
    plan = plan_of(GRAPH, where, **{"pp": 1, "dp": 8, **sizes})
    return plan.model_copy(update={"sharding": sharding, "island": island, "methods": CLIPS})


def both(plan: Plan, where: Cluster) -> tuple[float, float]:
    """Seconds of a step of the whole program, and of one replica in place of all."""
    whole, folded = (
        predict(
            CostModel(graph=GRAPH, cluster=where), plan, compile_plan(plan, GRAPH, only_replica=only)
        ).prediction.step_s
        for only in (None, 0)
    )
    return whole, folded


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("island", [2, 4])
def test_one_replica_predicts_what_all_of_them_do(island: int, sharding: Sharding) -> None:
    where = cluster(nodes=2, devices=4)
    for sizes in ({}, {"loops": 3, "schedule": "breadth-first"}, {"tp": 2, "dp": 4}):
        whole, folded = both(islands(where, island, sharding, **sizes), where)
        assert folded == pytest.approx(whole, rel=1e-6)


def test_one_island_stands_for_the_slowest_of_all() -> None:
    """On nodes of three, islands of two: the first lies on a node, the second on two."""
    where = cluster(nodes=3, devices=3)
    plan = islands(where, 2)
    program = compile_plan(plan, GRAPH, only_replica=0)
    gathers = np.flatnonzero(program.columns.kind == GATHER)
    (size,) = set(program.columns.bytes[gathers].tolist())
    assert program.groups[program.columns.group[gathers[0]]] == (0, 1)
    network = Network(cluster=where)
    seconds = network.all_gather((2, 3), size).seconds
    assert seconds > network.all_gather((0, 1), size).seconds
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    assert set(costs.occupancy[gathers].tolist()) == {round(seconds * 1e9)}
    assert costs.group_links is not None
    assert costs.group_links[program.columns.group[gathers[0]]]


def test_gathers_and_reductions_stay_inside_and_shares_cross() -> None:
    where = cluster(nodes=2, devices=4)
    plan = islands(where, 4)
    program = compile_plan(plan, GRAPH, only_replica=0)
    columns, network = program.columns, Network(cluster=where)
    (gather,), (reduce,), (across,) = (
        np.flatnonzero(columns.kind == kind).tolist() for kind in (GATHER, REDUCE, REDUCE_ACROSS)
    )
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    weights, gradients = int(columns.bytes[gather]), int(columns.bytes[reduce])
    inside = tuple(range(4))
    assert costs.occupancy[gather] == round(network.all_gather(inside, weights).seconds * 1e9)
    assert costs.occupancy[reduce] == round(network.reduce_scatter(inside, gradients).seconds * 1e9)
    # The four sums over both nodes run at once and share their link.
    assert columns.bytes[across] == -(-gradients // 4)
    alone = network.all_reduce((0, 4), -(-gradients // 4))
    expected = max(alone.seconds, 4 * alone.link_s)
    assert costs.occupancy[across] == round(expected * 1e9)


def test_replicas_hold_and_step_the_share_of_an_island_and_read_a_part_of_it() -> None:
    where = cluster(nodes=2, devices=4)
    found = {}
    for island in (None, 4, 2):
        plan = islands(where, island)
        program = compile_plan(plan, GRAPH)
        shape = Shape(plan.micro_batch_size, plan.sequence)
        size = stage_parameters(GRAPH, plan.stages[0].layers, shape)
        costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
        resident = resident_states(
            [(np.arange(8), size, island or 8)], 8, state_bytes("fp32"), "zero-3"
        ).total
        assert costs.base_bytes.tolist() == with_slack(resident).tolist()
        found[island] = [int(costs.occupancy[program.columns.kind == kind][0]) for kind in (STEP, NORM)]
    # One eighth, one quarter and one half of the parameters are stepped; all read an eighth of the gradient.
    assert found[4][0] > found[None][0]
    assert found[2][0] - found[4][0] == pytest.approx(2 * (found[4][0] - found[None][0]), rel=1e-2)
    assert found[None][1] == found[4][1] == found[2][1]
