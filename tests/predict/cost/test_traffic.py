"""The bytes that replicas send each other: by count, and in the prices of the same collectives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import CPU, MODEL, cluster
from predict.plans import plan_of

from weft.describe.cluster import Cluster, Link
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan, Sharding
from weft.describe.synchronisation import derived_options
from weft.planning.compile import compile_plan
from weft.predict.cost.codec_times import CodecTime, no_codec_s, unfused_codec_s
from weft.predict.cost.hooks import hook_of
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import price_placed
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.traffic import Traffic, busiest_codecs_s, price_with_codecs, traffic
from weft.predict.predict import predict_priced
from weft.program.kinds import KINDS

GRAPH = layer_graph(MODEL)
PARAMETERS = GRAPH.parameters()
BYTES_PER_S = 1e5
KINDS_OF = {
    "dense": ("gather", "reduce"),
    "sdp4bit": ("gather", "reduce", "reduce_between"),
    "power-sgd": ("gather", "reduce"),
    "local-averaging": ("average_weights",),
    "cser": ("synchronise_update", "reset_error"),
}
METHODS: tuple[tuple[Choice, Sharding], ...] = (
    (Choice(name="dense"), "zero-0"),
    (Choice(name="dense"), "zero-1"),
    (Choice(name="sdp4bit"), "zero-1"),
    (Choice(name="sdp4bit", options={"weights": "whole", "gradient_bits": 8}), "zero-2"),
    (Choice(name="power-sgd"), "zero-0"),
    (Choice(name="power-sgd", options={"rank": 2}), "zero-1"),
    (Choice(name="local-averaging", options={"every": 4}), "zero-0"),
    (Choice(name="cser", options={"ratio": 4.0, "every": 2}), "zero-0"),
    (Choice(name="cser", options={"ratio": 4.0, "every": 2, "compressor": "top-k"}), "zero-0"),
)


def joined_slowly(nodes: int, devices: int) -> Cluster:
    return replace(cluster(nodes, devices, CPU), links={("node", "node"): Link(BYTES_PER_S, 0.0)})


def priced(where: Cluster, sync: Choice, sharding: Sharding, **degrees: int) -> Pricing:
    """One replica on every device of the cluster, unless `degrees` say otherwise."""
    plan = plan_of(GRAPH, where, **({"pp": 1, "dp": where.ranks, "micro_batches": 1} | degrees))
    options = {**sync.options, **derived_options(sync, plan.stages, where)}
    changes = {"sync": Choice(name=sync.name, options=options), "sharding": sharding}
    return pricing_of(plan.model_copy(update=changes), where)


def pricing_of(plan: Plan, where: Cluster, graph: LayerGraph = GRAPH) -> Pricing:
    program = compile_plan(plan, graph)
    model = CostModel(graph=graph, cluster=where)
    return Pricing(program=program, placed=PlacedPlan(program=program, plan=plan, model=model))


@given(st.sampled_from(METHODS), st.integers(2, 4), st.integers(1, 3))
def test_a_link_between_nodes_is_busy_with_the_counted_bytes(
    method: tuple[Choice, Sharding], nodes: int, devices: int
) -> None:
    pricing = priced(joined_slowly(nodes, devices), *method)
    columns, busy_s = pricing.program.columns, 0.0
    for kind in KINDS_OF[method[0].name]:
        rows = np.flatnonzero((columns.kind == KINDS.code(kind)) & (columns.rank == 0))
        busy_s += float(hook_of(kind)(pricing, rows).link.sum()) if len(rows) else 0.0
    counted = traffic(pricing).between_bytes
    assert counted * pricing.program.steps_per_cycle == pytest.approx(busy_s * BYTES_PER_S, rel=1e-6)


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(("zero-0", "zero-1")))
def test_dense_sums_send_what_the_formulas_say(nodes: int, devices: int, sharding: Sharding) -> None:
    if nodes * devices == 1:
        return
    pricing = priced(joined_slowly(nodes, devices), Choice(name="dense"), sharding)
    sent = traffic(pricing)
    both_ways = 2 * 4 * PARAMETERS
    assert sent.between_bytes == pytest.approx((nodes - 1) / nodes * both_ways)
    assert sent.inside_bytes == pytest.approx((devices - 1) * both_ways)
    assert busiest_codecs_s(pricing) == 0.0


@given(st.sampled_from([1, 2, 4]), st.integers(2, 3))
def test_replicas_that_meet_half_as_often_send_half_as_much(every: int, devices: int) -> None:
    often, seldom = (
        traffic(
            priced(joined_slowly(2, devices), Choice(name="local-averaging", options={"every": k}), "zero-0")
        )
        for k in (every, 2 * every)
    )
    assert np.array(seldom) * 2 == pytest.approx(np.array(often))


def test_few_bits_on_two_levels_send_their_bits_and_scales() -> None:
    pricing = priced(joined_slowly(2, 2), Choice(name="sdp4bit"), "zero-1")
    sent = traffic(pricing)
    gradient, inside, weight = (bits + 32 / group for bits, group in ((4, 128), (8, 128), (4, 2048)))
    assert sent.between_bytes == pytest.approx(PARAMETERS / 8 * (gradient + weight) / 2)
    assert sent.inside_bytes == pytest.approx(PARAMETERS / 8 * (inside + weight))
    assert 0.0 < busiest_codecs_s(pricing) < busiest_codecs_s(pricing, unfused_codec_s)


def test_unequal_nodes_are_a_ring_and_the_fullest_node_counts() -> None:
    sent = traffic(priced(joined_slowly(2, 3), Choice(name="dense"), "zero-1", dp=4))
    both_ways = 2 * 4 * PARAMETERS * 3 / 4
    assert sent == Traffic(pytest.approx(both_ways), pytest.approx(2 * both_ways))


def test_copies_of_tied_weights_count() -> None:
    graph, where = layer_graph(replace(MODEL, tied_embeddings=True)), joined_slowly(2, 1)
    pricing = pricing_of(plan_of(graph, where, pp=2), where, graph)
    assert traffic(pricing).between_bytes == pytest.approx(4 * MODEL.vocabulary * MODEL.hidden)


@pytest.mark.parametrize("codec", [no_codec_s, unfused_codec_s])
def test_only_codecs_change_with_other_codecs(codec: CodecTime) -> None:
    for sync, sharding in METHODS:
        pricing = priced(joined_slowly(2, 2), sync, sharding)
        usual, changed = (
            one(pricing.placed, pricing.program) for one in (price_placed, price_with_codecs(codec))
        )
        with_them, without = (usual, changed) if codec is no_codec_s else (changed, usual)
        saved = with_them.costs.occupancy - without.costs.occupancy
        busiest = np.bincount(pricing.program.columns.rank, weights=saved).max()
        saved_s = abs(busiest_codecs_s(pricing) - busiest_codecs_s(pricing, codec))
        assert busiest == pytest.approx(saved_s / with_them.costs.tick_s, abs=2)
        step_s, at_once_s = (
            predict_priced(pricing.program, one).prediction.step_s for one in (with_them, without)
        )
        assert (step_s > at_once_s) == (sync.name == "sdp4bit")
