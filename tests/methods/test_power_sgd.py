"""PowerSGD refuses what it cannot do, and is priced by the factors that it sends and the errors it keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import MODEL, cluster
from predict.plans import plan_of

from weft.bundles import bundles, parts_of
from weft.describe.cluster import Cluster, Link
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.methods.power_sgd.options import PowerSgdOptions
from weft.methods.power_sgd.traffic import matrices_of, sent_elements
from weft.methods.sharding.kinds import REDUCE
from weft.moves.composition import Composition
from weft.planning.compile import compile_plan
from weft.predict.cost.memory import own_parameters, with_slack
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import price, price_placed

BUNDLE = bundles()["power-sgd"]
GRAPH = layer_graph(MODEL)


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 4096), st.floats(0.1, 100.0, allow_nan=False))
def test_factors_have_fewer_elements_by_the_least_ratio(
    rank: int, rows: int, columns: int, least: float
) -> None:
    options = PowerSgdOptions(rank=rank, minimum_compression=least)
    used = options.rank_of(rows, columns)
    assert used in (0, min(rank, rows, columns))
    assert bool(used) == (rows * columns >= least * min(rank, rows, columns) * (rows + columns))


def joined_by(bytes_per_s: float, latency_s: float) -> Cluster:
    """Two nodes of one device."""
    link = Link(bytes_per_s, latency_s)
    return replace(cluster(nodes=2, devices=1), links={("node", "node"): link})


def factored(plan: Plan, sharding: str = "zero-0", **options: float) -> Plan:
    sync = Choice(name="power-sgd", options=options)
    return plan.model_copy(update={"sync": sync, "sharding": sharding})


def reduction_ticks(where: Cluster, plan: Plan) -> float:
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    return float(costs.occupancy[program.columns.kind == REDUCE].max())


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1"])
def test_reductions_take_the_time_of_their_factors(sharding: str) -> None:
    """Sharded replicas save a half of dense sums, and nothing of factored ones."""
    slow, far = joined_by(1e3, 0.0), joined_by(1e15, 100.0)
    dense = plan_of(GRAPH, slow, pp=1, dp=2).model_copy(update={"sharding": sharding})
    few = factored(dense, sharding, rank=1, minimum_compression=1.0)
    layers, shape = few.stages[0].layers, few.shape(0)
    options = PowerSgdOptions(rank=1, minimum_compression=1.0)
    share = sent_elements(options, GRAPH, layers, shape) / own_parameters(GRAPH, layers, shape)
    assert 0.0 < share < 0.25
    sides = 1.0 if sharding == "zero-0" else 2.0
    expected = sides * share * reduction_ticks(slow, dense)
    assert reduction_ticks(slow, few) == pytest.approx(expected, rel=0.01)
    # Two messages follow one another.
    assert reduction_ticks(far, few) == pytest.approx(2.0 * reduction_ticks(far, dense), rel=0.01)


@pytest.mark.parametrize(("sharding", "gradients"), [("zero-0", 1), ("zero-1", 2)])
def test_a_rank_keeps_an_error_for_each_gradient(sharding: str, gradients: int) -> None:
    where = cluster(nodes=2, devices=1)
    dense = plan_of(GRAPH, where, pp=1, dp=2).model_copy(update={"sharding": sharding})
    few = factored(dense, sharding, rank=1, minimum_compression=1.0)
    layers, shape = few.stages[0].layers, few.shape(0)
    rights = sum(one.columns for one in matrices_of(GRAPH, layers, shape))
    added = 4 * (gradients * own_parameters(GRAPH, layers, shape) + rights)
    model = CostModel(graph=GRAPH, cluster=where)
    held = []
    for plan in (dense, few):
        program = compile_plan(plan, GRAPH)
        placed = PlacedPlan(program=program, plan=plan, model=model)
        held.append(price_placed(placed, program).costs.base_bytes)
    assert np.abs(held[1] - held[0] - with_slack(np.array(added))).max() <= 1


LAYOUT = Layout(pp=1, dp=8, loops=1, micro_batch_size=1, schedule="1f1b", sync="power-sgd")


@pytest.mark.parametrize(
    ("changes", "precision", "expected"),
    [
        ({}, "bf16", None),
        ({"sharding": "zero-1"}, "fp64", None),
        ({"dp": 1}, "fp32", "one replica sends nothing; nearest sync.method: dense"),
        (
            {"sharding": "zero-2"},
            "fp32",
            "every replica keeps an error as large as its whole gradients, which zero-2 shards; "
            "nearest sharding: zero-1",
        ),
        (
            {"sharding": "zero-1", "island": 2},
            "fp32",
            "factors of a shard differ from those of the matrix; nearest island: none",
        ),
        (
            {},
            "fp16",
            "errors have the scale of earlier losses, and fp16 changes it; nearest precision: bf16",
        ),
    ],
)
def test_layouts_and_plans_that_cannot_send_factors_are_refused(
    changes: dict[str, object], precision: str, expected: str | None
) -> None:
    where, layout = cluster(nodes=8, devices=1), replace(LAYOUT, **changes)
    job = Job(graph=GRAPH, cluster=where, global_batch=8, sequence=GRAPH.sequence, precision=precision)
    (composition,) = parts_of(Composition, [BUNDLE])
    reason = None if expected is None else f"power-sgd: {expected}"
    assert composition.refuse(job, layout) == reason
    (rule,) = parts_of(PlanRule, [BUNDLE])
    plan = plan_of(GRAPH, where, pp=1, dp=layout.dp, precision=precision)
    update = {"sharding": layout.sharding, "island": layout.island, "sync": Choice(name="power-sgd")}
    found = [str(one) for one in rule.refuse(plan.model_copy(update=update), GRAPH)]
    assert len(found) == (expected is not None)
    assert all(expected.split("; nearest")[0] in one for one in found)


def test_unequal_devices_send_factors_only_where_one_of_them_steps_each_weight() -> None:
    where = cluster(nodes=8, devices=1)
    other = replace(where.groups[0], name="others", device=replace(where.groups[0].device, name="other"))
    job = Job(
        graph=GRAPH,
        cluster=replace(where, groups=(*where.groups, other)),
        global_batch=8,
        sequence=GRAPH.sequence,
    )
    (composition,) = parts_of(Composition, [BUNDLE])
    assert composition.refuse(job, replace(LAYOUT, sharding="zero-1")) is None
    assert "replicas would drift apart; nearest sharding: zero-1" in str(composition.refuse(job, LAYOUT))


def test_a_plan_with_options_of_another_method_is_refused() -> None:
    (rule,) = parts_of(PlanRule, [BUNDLE])
    plan = factored(plan_of(GRAPH, cluster(nodes=2, devices=1), pp=1, dp=2), rank=1, every=3)
    (problem,) = rule.refuse(plan, GRAPH)
    assert str(problem).startswith("plan: sync.options: every: unknown key; allowed are rank, ")
