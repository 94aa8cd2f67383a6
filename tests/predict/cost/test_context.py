"""Context ranks divide what counts tokens, once; they keep, gather and add up what the family says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from predict.cost.machines import CPU, GPU, MODEL, cluster, profile_of
from predict.plans import plan_of

from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.planning.compile import compile_plan
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.exchanges import LOSS_BYTES
from weft.predict.cost.memory import (
    context_kept,
    own_parameters,
    stage_kept_bytes,
    stage_product_bytes,
)
from weft.predict.cost.network import CollectiveTime, Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict
from weft.program.fold import fold_lanes
from weft.program.kinds import BACKWARD, BACKWARD_WEIGHT, FORWARD, SEND_ACTIVATION, STEP
from weft.program.program import Program

GRAPH = layer_graph(resolve_model("gpt-1m"))
PRESETS = ("gpt-1m", "llama-13b", "bert-base")


def spread(plan: Plan, cp: int) -> Plan:
    """The plan of `cp` tensor ranks with context ranks in their place."""
    mesh = {axis: size for axis, size in plan.mesh.items() if axis != "tp"} | {"cp": cp}
    return plan.model_copy(update={"mesh": mesh})


def costs_of(plan: Plan, where: Cluster | None = None) -> tuple[Program, np.ndarray]:
    program = compile_plan(plan, GRAPH)
    return program, price(CostModel(graph=GRAPH, cluster=where or cluster()), program, plan).costs.occupancy


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_together_compute_and_send_what_one_does(preset: str, cp: int) -> None:
    graph = layer_graph(resolve_model(preset))
    whole, own = Shape(2, graph.sequence), Shape(2, graph.sequence, context_parallel=cp)
    for layer in graph.layers:
        for work in (layer.forward, layer.backward_input, layer.backward_weight):
            assert cp * work.flops(own) == pytest.approx(work.flops(whole), rel=1e-12)
        assert cp * layer.sent(own) == layer.sent(whole)
        assert layer.parameters(own) == layer.parameters(whole)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_keeps_its_share_and_all_keys_and_values(preset: str) -> None:
    config = resolve_model(preset)
    graph, own = layer_graph(config), Shape(2, config.sequence, context_parallel=4)
    whole = replace(own, context_parallel=1)
    [block] = [index for index, layer in enumerate(graph.layers) if layer.name == "block.0"]
    keys = config.hidden // config.heads * config.key_value_heads
    divided = context_kept(graph.layers[block], own)
    gathered = 2 * keys * 2 * config.sequence
    tokens = 2 * config.sequence / 4 * config.hidden
    assert divided - gathered == pytest.approx(
        tokens * {"bert-base": -2, "gpt-1m": 1, "llama-13b": -1}[preset]
    )
    assert context_kept(graph.layers[block], whole) == 0.0
    expected = stage_kept_bytes(graph, (block,), whole, "fp32") / 4 + 4 * divided
    assert stage_kept_bytes(graph, (block,), own, "fp32") == pytest.approx(expected)
    # What products leave is of the own tokens: keys and values are gathered again.
    again = stage_product_bytes(graph, (block,), own, "fp32")
    assert 4 * again == stage_product_bytes(graph, (block,), whole, "fp32")


def test_passes_pay_for_keys_and_values_and_the_last_one_for_the_gradient() -> None:
    where = cluster()
    plan = spread(plan_of(GRAPH, where, pp=2, tp=2), 2)
    program, occupancy = costs_of(plan)
    network, shape = Network(cluster=where), Shape(2, GRAPH.sequence, context_parallel=2)
    for stage, described in enumerate(plan.stages):
        times = ComputeModel().stage_times(GRAPH, described.layers, shape, "fp32", GPU)
        ranks = described.replicas[0].ranks
        sizes = [round(2 * 4 * GRAPH.layers[layer].gathered(shape)) for layer in described.layers]
        keys_s = sum(network.all_gather(ranks, size).seconds for size in sizes if size)
        loss_s = stage * network.all_gather(ranks, 2 * LOSS_BYTES).seconds
        gradient_bytes = 4 * own_parameters(GRAPH, described.layers, shape)
        mine = (program.columns.stage == stage) & (program.columns.rank == ranks[0])
        forwards = occupancy[mine & (program.columns.kind == FORWARD)]
        assert set(forwards.tolist()) == {round((times.forward_s + keys_s + loss_s) * 1e9)}
        *others, last = occupancy[mine & (program.columns.kind == BACKWARD)].tolist()
        backward_s = times.backward_input_s + times.backward_weight_s + keys_s
        assert others == pytest.approx([backward_s * 1e9] * len(others), abs=1)
        assert last - others[0] == pytest.approx(network.all_reduce_s(ranks, gradient_bytes) * 1e9, abs=2)
    sends = program.columns.bytes[program.columns.kind == SEND_ACTIVATION]
    [width] = {round(GRAPH.layers[1].sent(shape))}
    assert set(sends.tolist()) == {4 * width}


@pytest.mark.parametrize(("schedule", "kind"), [("zb-h1", BACKWARD_WEIGHT), ("1f1b", BACKWARD)])
def test_only_the_computation_before_the_step_adds_the_gradient_up(schedule: str, kind: int) -> None:
    plan = spread(plan_of(GRAPH, cluster(), pp=2, tp=2, schedule=schedule), 2)
    program, occupancy = costs_of(plan)
    for rank in range(program.ranks):
        mine = program.columns.rank == rank
        computed = occupancy[mine & (program.columns.kind == kind)]
        assert (computed == computed.max()).sum() == 1
        assert computed[-1] == computed.max()
        assert (program.columns.kind[mine] == STEP).sum() == 1


def test_recomputed_passes_gather_again() -> None:
    plan = spread(plan_of(GRAPH, cluster(), pp=2, tp=2), 2)
    stages = tuple(stage.model_copy(update={"recompute": "full"}) for stage in plan.stages)
    program, once = costs_of(plan)
    _, twice = costs_of(plan.model_copy(update={"stages": stages}))
    first = program.columns.stage == 0
    forward = once[first & (program.columns.kind == FORWARD)][0]
    assert (twice - once)[first & (program.columns.kind == BACKWARD)] == pytest.approx(forward, abs=2)


def test_a_profile_of_whole_sequences_is_divided() -> None:
    """Passes and what they leave; not the update, of parameters that every rank has."""
    graph = layer_graph(MODEL)
    model = ComputeModel(profile=profile_of(graph))
    whole, own = Shape(2, graph.sequence), Shape(2, graph.sequence, context_parallel=2)
    one, two = (model.stage_times(graph, (0, 1, 2), shape, "fp32", CPU) for shape in (whole, own))
    assert 2 * two.forward_s == pytest.approx(one.forward_s)
    both = [times.backward_input_s + times.backward_weight_s for times in (one, two)]
    assert 2 * both[1] == pytest.approx(both[0])
    assert two.update_s == one.update_s
    kept = [model.kept_bytes(graph, (1,), shape, "fp32", CPU) for shape in (whole, own)]
    assert kept[1] == round(kept[0] / 2 + 4 * context_kept(graph.layers[1], own))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_one_lane_predicts_what_all_do(pp: int, tp: int, tied: bool) -> None:
    where = cluster(nodes=4 * tp, devices=2)
    graph = layer_graph(replace(resolve_model("gpt-1m"), tied_embeddings=tied))
    plan = spread(plan_of(graph, where, pp=pp, dp=2, tp=2 * tp), 2)
    program = compile_plan(plan, graph)
    whole, folded = (
        predict(CostModel(graph=graph, cluster=where), plan, one) for one in (program, fold_lanes(program))
    )
    assert folded.prediction.peak_bytes == whole.prediction.peak_bytes
    assert folded.prediction.step_s == pytest.approx(whole.prediction.step_s, rel=1e-5)


def test_both_axes_pay_for_their_groups_and_for_sharing_a_node_s_link() -> None:
    """Tensor ranks on one node each; both of a node meet their context ranks on the other at once."""
    where = cluster(nodes=2, devices=2)
    plan = spread(plan_of(GRAPH, where, pp=1, tp=4), 2)
    program, occupancy = costs_of(plan, where)
    network, shape = Network(cluster=where), plan.shape(0)
    assert (shape.tensor_parallel, shape.context_parallel) == (2, 2)
    times = ComputeModel().stage_times(GRAPH, plan.stages[0].layers, shape, "fp32", GPU)
    layers = [GRAPH.layers[layer] for layer in plan.stages[0].layers]
    reduced_s = sum(
        layer.tensor_exchanges
        * network.all_reduce_s((0, 1), round(4 * layer.tensor_reduced(shape) / layer.tensor_exchanges))
        for layer in layers
    )

    def both(taken: CollectiveTime) -> float:
        return max(taken.seconds, 2 * taken.link_s)

    keys = [size for layer in layers if (size := round(2 * 4 * layer.gathered(shape)))]
    keys_s = sum(both(network.all_gather((0, 2), size)) for size in keys)
    loss_s = network.all_gather((0, 2), 2 * LOSS_BYTES).seconds
    forwards = occupancy[program.columns.kind == FORWARD]
    assert forwards == pytest.approx(
        [(times.forward_s + reduced_s + keys_s + loss_s) * 1e9] * len(forwards), abs=2
    )
    gradient_bytes = 4 * own_parameters(GRAPH, plan.stages[0].layers, shape)
    *others, last = occupancy[(program.columns.kind == BACKWARD) & (program.columns.rank == 3)].tolist()
    gradient = network.all_reduce((0, 2), gradient_bytes)
    assert both(gradient) > gradient.seconds
    assert last - others[0] == pytest.approx(both(gradient) * 1e9, abs=2)


@pytest.mark.parametrize("preset", PRESETS)
def test_four_ranks_of_both_axes_compute_what_one_does(preset: str) -> None:
    graph = layer_graph(resolve_model(preset))
    whole, own = Shape(2, graph.sequence), Shape(2, graph.sequence, 2, 2)
    for layer in graph.layers:
        for work in (layer.forward, layer.backward_input, layer.backward_weight):
            assert 4 * work.flops(own) == pytest.approx(work.flops(whole), rel=1e-12)
        assert 4 * layer.sent(own) == layer.sent(whole)
        assert layer.parameters(own) == layer.parameters(replace(own, context_parallel=1))
        assert 2 * layer.tensor_reduced(own) == layer.tensor_reduced(replace(own, context_parallel=1))
        assert 4 * layer.gathered(own) == layer.gathered(whole)
