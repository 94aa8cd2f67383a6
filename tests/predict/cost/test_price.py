from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from asked_methods import CLIPS
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import BETWEEN, CPU, GPU, MACHINE, MODEL, cluster, profile_of
from predict.plans import plan_of

from weft.describe.amount import Shape
from weft.describe.cluster import Link
from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.methods.gradient_norm.kinds import NORM
from weft.methods.sharding.kinds import REDUCE
from weft.planning.compile import compile_plan
from weft.predict.cost import hooks
from weft.predict.cost.collective_library import SHARE_BETWEEN
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.exchanges import LOSS_BYTES, gathered_bytes
from weft.predict.cost.hooks import CostOf, takes_nothing
from weft.predict.cost.memory import (
    ALLOCATOR_SLACK,
    stage_input_bytes,
    stage_kept_bytes,
    stage_parameters,
    state_bytes,
)
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict
from weft.predict.simulator import simulate
from weft.program.kinds import BACKWARD, FORWARD, KINDS, SEND_ACTIVATION, SEND_GRADIENT, STEP, Kind

GRAPH = layer_graph(MODEL)
shapes = st.fixed_dictionaries(
    {
        "pp": st.integers(1, 3),
        "dp": st.integers(1, 2),
        "schedule": st.sampled_from(["gpipe", "1f1b", "breadth-first"]),
        "micro_batches": st.integers(1, 4),
        "micro_batch_size": st.integers(1, 3),
    }
)


@given(shapes)
def test_whatever_a_step_adds_to_a_ranks_bytes_it_frees(shape: dict[str, int]) -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, **shape)
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    change = np.bincount(program.columns.rank, weights=costs.live_bytes, minlength=program.ranks)
    assert change.tolist() == [0.0] * program.ranks
    assert (costs.occupancy >= 0).all()
    assert (costs.latency >= 0).all()


@given(shapes)
def test_one_replica_predicts_what_all_of_them_do(shape: dict[str, int]) -> None:
    """With three stages on nodes of four the replicas' links differ, and the fold takes the slower ones."""
    where = cluster()
    plan = plan_of(GRAPH, where, **{**shape, "dp": 2})
    whole, folded = (
        predict(
            CostModel(graph=GRAPH, cluster=where), plan, compile_plan(plan, GRAPH, only_replica=only)
        ).prediction
        for only in (None, 0)
    )
    assert folded.step_s == whole.step_s or (shape["pp"] == 3 and folded.step_s > whole.step_s)
    if shape["pp"] != 3:
        assert folded == whole


def test_a_folded_replica_runs_on_the_worst_devices_of_all() -> None:
    one = cluster(nodes=1, devices=2)
    slow = replace(GPU, name="slow", flops_per_s={"fp32": 1e12}, memory_bytes_per_s=1e11)
    where = replace(
        one,
        groups=(one.groups[0], replace(one.groups[0], name="slow", device=slow)),
        links={("node", "slow"): BETWEEN},
    )
    plan = plan_of(GRAPH, where, pp=2, dp=2)
    whole, folded = (
        predict(
            CostModel(graph=GRAPH, cluster=where), plan, compile_plan(plan, GRAPH, only_replica=only)
        ).prediction.step_s
        for only in (None, 0)
    )
    assert folded == whole


def test_instructions_cost_what_their_stage_their_link_and_their_group_say() -> None:
    where = cluster(nodes=2, devices=2)
    plan = plan_of(GRAPH, where, pp=2, dp=2)
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    columns = program.columns
    for stage in range(2):
        times = ComputeModel().stage_times(
            GRAPH, plan.stages[stage].layers, Shape(2, GRAPH.sequence), "fp32", GPU
        )
        for kind, seconds in (
            (FORWARD, times.forward_s),
            (BACKWARD, times.backward_input_s + times.backward_weight_s),
            (STEP, times.update_s),
        ):
            mine = (columns.kind == kind) & (columns.stage == stage)
            assert costs.occupancy[mine].tolist() == [round(seconds * 1e9)] * int(mine.sum())
    reduces = np.flatnonzero(columns.kind == REDUCE)
    assert len(reduces) == 4
    for row in reduces.tolist():
        seconds = Network(cluster=where).all_reduce_s((0, 2), int(columns.bytes[row]))
        assert costs.occupancy[row] == round(seconds * 1e9)


def test_messages_arrive_as_late_as_their_link_says() -> None:
    """One micro-batch goes over the link and its gradient comes back: two latencies, whatever the bytes."""
    far = Link(BETWEEN.bytes_per_s, 5e-3)
    near, late = (
        replace(cluster(nodes=2, devices=1), links={("node", "node"): link})
        for link in (replace(far, latency_s=0.0), far)
    )
    plan = plan_of(GRAPH, near, pp=2, micro_batches=1)
    program = compile_plan(plan, GRAPH)
    before, after = (
        price(CostModel(graph=GRAPH, cluster=where), program, plan).costs for where in (near, late)
    )
    sends = np.isin(program.columns.kind, (SEND_ACTIVATION, SEND_GRADIENT))
    assert sends.sum() == 2
    assert (after.latency - before.latency)[sends].tolist() == [5_000_000, 5_000_000]
    assert after.occupancy.tolist() == before.occupancy.tolist()
    steps = [simulate(program, costs).step_s for costs in (before, after)]
    assert steps[1] - steps[0] == pytest.approx(10e-3, rel=1e-6)


def test_replicas_side_by_side_share_their_nodes_link_folded_or_not() -> None:
    """Two replicas side by side: both send from node 0 to node 1 in step."""
    where = cluster(nodes=2, devices=2)
    plan = plan_of(GRAPH, where, pp=2, dp=2)
    stages = [
        stage.model_copy(
            update={
                "replicas": tuple(
                    copy.model_copy(update={"ranks": (2 * device + replica,)})
                    for replica, copy in enumerate(stage.replicas)
                )
            }
        )
        for device, stage in enumerate(plan.stages)
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    steps = []
    for only, alone in ((None, 1), (0, 2)):
        program = compile_plan(plan, GRAPH, only_replica=only)
        costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
        sends = np.flatnonzero(program.columns.kind == SEND_ACTIVATION)
        seconds = program.columns.bytes[sends] / (SHARE_BETWEEN * BETWEEN.bytes_per_s)
        assert costs.occupancy[sends].tolist() == np.rint(alone * seconds * 1e9).tolist()
        assert costs.links is not None
        assert (costs.links[sends] >= 0).all()
        simulation = simulate(program, costs)
        timeline = simulation.timeline
        took = (timeline.end_ns - timeline.start_ns)[timeline.kind == SEND_ACTIVATION]
        assert took == pytest.approx(2 * seconds * 1e9, abs=1.5)
        steps.append(simulation.step_s)
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_tensor_ranks_pay_for_their_reductions() -> None:
    where = cluster()
    shape = Shape(2, GRAPH.sequence, 2)
    plan = plan_of(GRAPH, where, pp=2, tp=2)
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    layers = plan.stages[0].layers
    times = ComputeModel().stage_times(GRAPH, layers, shape, "fp32", GPU)
    # A block all-reduces twice: after its attention and after its feed-forward.
    assert [GRAPH.layers[layer].tensor_exchanges for layer in layers] == [1, *[2] * (len(layers) - 1)]
    tokens_bytes = 4 * shape.micro_batch_size * shape.sequence * MODEL.hidden
    sizes = [tokens_bytes // 2, *[tokens_bytes] * 2 * (len(layers) - 1)]
    seconds = times.forward_s + sum(Network(cluster=where).all_reduce_s((0, 1), size) for size in sizes)
    mine = (program.columns.kind == FORWARD) & (program.columns.stage == 0)
    assert set(costs.occupancy[mine].tolist()) == {round(seconds * 1e9)}


def test_measured_tensor_ranks_cost_their_rows_and_no_exchange_twice() -> None:
    where = cluster(nodes=1, device=CPU)
    one, two = profile_of(GRAPH), profile_of(GRAPH, tp=2, times=0.6)
    plan = plan_of(GRAPH, where, pp=2, tp=2)
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where, profile=one.renewed(two)), program, plan).costs
    rows = {row.micro_batch_size: row for row in two.timings}
    row, columns = rows[plan.micro_batch_size], program.columns
    for kind, seconds in ((FORWARD, row.forward_s), (BACKWARD, row.backward_s), (STEP, row.update_s)):
        for stage in range(2):
            mine = (columns.kind == kind) & (columns.stage == stage)
            expected = round(len(plan.stages[stage].layers) * seconds * 1e9)
            assert costs.occupancy[mine] == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("only_replica", [None, 0])
def test_context_ranks_exchange_beside_what_rows_of_tensor_ranks_contain(only_replica: int | None) -> None:
    """The rows say nothing of keys and values; each of two context ranks has half of the tokens."""
    where = cluster(nodes=1, device=CPU)
    two = profile_of(GRAPH, tp=2)
    plan = plan_of(GRAPH, where, pp=1, tp=4)
    mesh = {"pp": 1, "dp": 1, "tp": 2, "cp": 2}
    plan = plan.model_copy(update={"mesh": mesh})
    program = compile_plan(plan, GRAPH, only_replica=only_replica)
    columns = program.columns
    forward = columns.kind == FORWARD
    costs = price(CostModel(graph=GRAPH, cluster=where, profile=two), program, plan).costs
    row = next(row for row in two.timings if row.micro_batch_size == plan.micro_batch_size)
    of_layers_s = len(GRAPH.layers) * row.forward_s / 2
    exchanged_s = costs.occupancy[forward].max() * 1e-9 - of_layers_s
    network, shape = Network(cluster=where), plan.shape(0)
    gathered = [gathered_bytes(GRAPH, layer, shape, 4) for layer in range(len(GRAPH.layers))]
    sizes = [*filter(None, gathered), 2 * LOSS_BYTES]
    assert len(sizes) == MODEL.layers + 1
    gathers_s = sum(network.all_gather((0, 2), size).seconds for size in sizes)
    assert exchanged_s == pytest.approx(gathers_s, abs=1e-9)


def recomputing(plan: Plan) -> Plan:
    stages = tuple(stage.model_copy(update={"recompute": "full"}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


def test_recomputing_stages_run_forward_again_and_reduce_over_tensor_ranks_again() -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, pp=2, tp=2)
    program = compile_plan(plan, GRAPH)
    once, twice = (
        price(CostModel(graph=GRAPH, cluster=where), program, each).costs.occupancy
        for each in (plan, recomputing(plan))
    )
    columns = program.columns
    for stage in range(2):
        of_stage = columns.stage == stage
        forward = once[of_stage & (columns.kind == FORWARD)][0]
        backward = of_stage & (columns.kind == BACKWARD)
        assert (twice - once)[backward] == pytest.approx(forward, abs=2)
    others = columns.kind != BACKWARD
    assert (once[others] == twice[others]).all()


@given(st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 4))
def test_recomputing_ranks_keep_inputs_only_and_make_one_layer_again_at_a_time(
    schedule: str, micro_batches: int
) -> None:
    where = cluster()
    plan = recomputing(plan_of(GRAPH, where, pp=2, schedule=schedule, micro_batches=micro_batches))
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    change = np.bincount(program.columns.rank, weights=costs.live_bytes, minlength=program.ranks)
    assert change.tolist() == [0.0] * program.ranks
    model = CostModel(graph=GRAPH, cluster=where)
    kept = price(model, program, plan_of(GRAPH, where, pp=2, schedule=schedule)).costs
    assert costs.base_bytes.tolist() == kept.base_bytes.tolist()
    shape = Shape(plan.micro_batch_size, plan.sequence)
    for rank, stage in enumerate(plan.stages):
        taken = model.compute.taken_bytes(GRAPH, stage.layers, shape, plan.precision, GPU, "full")
        backwards = (program.columns.kind == BACKWARD) & (program.columns.rank == rank)
        assert costs.working[backwards] == pytest.approx(taken * (1 + ALLOCATOR_SLACK), abs=2)
        assert costs.working.sum() > costs.working[backwards].sum()
        inputs = stage_input_bytes(GRAPH, stage.layers, shape, plan.precision) * (1 + ALLOCATOR_SLACK)
        forwards = (program.columns.kind == FORWARD) & (program.columns.rank == rank)
        sent = 0 if rank == 1 else (1 + ALLOCATOR_SLACK) * program.columns.bytes.max()
        received = 0 if rank == 0 else (1 + ALLOCATOR_SLACK) * program.columns.bytes.max()
        assert costs.live_bytes[forwards] == pytest.approx(inputs + sent - received, abs=4)


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3"])
def test_replicas_that_share_states_out_step_their_share(sharding: str) -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, pp=1, dp=4)
    shared = plan.model_copy(update={"sharding": sharding})
    whole, share = (
        (program.columns.kind, price(CostModel(graph=GRAPH, cluster=where), program, each).costs.occupancy)
        for each in (plan, shared)
        for program in [compile_plan(each, GRAPH)]
    )
    assert share[1][share[0] == STEP] * 4 == pytest.approx(whole[1][whole[0] == STEP], abs=4)


def test_ranks_hold_states_and_keep_activations() -> None:
    where = cluster()
    for dp in (1, 2):
        plan = plan_of(GRAPH, where, pp=1, dp=dp, micro_batches=1)
        program = compile_plan(plan, GRAPH)
        layers, shape = plan.stages[0].layers, Shape(2, GRAPH.sequence)
        states = state_bytes("fp32")
        parameters = stage_parameters(GRAPH, layers, shape)
        held = parameters * (states.total + (states.gradients if dp > 1 else 0))
        kept = stage_kept_bytes(GRAPH, layers, shape, "fp32")
        costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
        assert costs.base_bytes.tolist() == [round(held * (1 + ALLOCATOR_SLACK))] * dp
        prediction = predict(CostModel(graph=GRAPH, cluster=where), plan, program).prediction
        model = CostModel(graph=GRAPH, cluster=where)
        taken = model.compute.taken_bytes(GRAPH, layers, shape, "fp32", where.device_of(0))
        assert taken > 0
        assert prediction.peak_bytes[0] == pytest.approx((held + kept + taken) * (1 + ALLOCATOR_SLACK), abs=2)


def test_a_message_is_held_at_both_ends_while_it_is_needed() -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, pp=2, micro_batches=1)
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    sent = int(program.columns.bytes.max())
    held = round(sent * (1 + ALLOCATOR_SLACK))
    names = [program.instruction(row).kind.name for row in range(len(program))]
    live = dict(
        zip(zip(names, program.columns.rank.tolist(), strict=True), costs.live_bytes.tolist(), strict=True)
    )
    assert live["send_activation", 0] == live["send_gradient", 1] == -held
    assert live["receive_activation", 1] == live["receive_gradient", 0] == held
    assert live["forward", 0] + live["backward", 0] == 0
    assert live["forward", 1] + live["backward", 1] == 0


def test_a_mixed_cluster_is_priced_device_by_device() -> None:
    one = cluster(nodes=1, devices=1)
    slow = replace(GPU, name="slow", flops_per_s={"fp32": 1e12}, memory_bytes_per_s=1e11)
    group = replace(one.groups[0], name="slow", device=slow)
    where = replace(one, groups=(one.groups[0], group), links={("node", "slow"): BETWEEN})
    plan = plan_of(GRAPH, where, pp=1, dp=2)
    program = compile_plan(plan, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    forward = program.columns.kind == FORWARD
    fast, slower = (costs.occupancy[forward & (program.columns.rank == rank)] for rank in (0, 1))
    assert slower.min() > fast.max()


def test_the_source_and_the_interval_follow_what_is_known() -> None:
    where = cluster(device=CPU)
    plan = plan_of(GRAPH, where)
    program = compile_plan(plan, GRAPH)
    answers = [
        ({}, "data sheet", 0.30),
        ({"machine": MACHINE}, "measured machine", 0.15),
        ({"machine": MACHINE, "profile": profile_of(GRAPH, spread=0.12)}, "layer profile", 0.12),
    ]
    for known, source, half_width in answers:
        predicted = predict(CostModel(graph=GRAPH, cluster=where, **known), plan, program, run_name="name")
        prediction = predicted.prediction
        assert prediction.source == source
        assert prediction.step_low_s == pytest.approx(prediction.step_s * (1 - half_width))
        assert prediction.step_high_s == pytest.approx(prediction.step_s * (1 + half_width))
        timeline = predicted.simulation.timeline
        assert (timeline.run, timeline.plan_id, timeline.clock) == ("name", plan.plan_id, "predicted")
        assert predicted.priced.costs.synchronous.all()


@pytest.mark.parametrize("spread", [0.95, 1.0, 1.4])
def test_a_measurement_that_spreads_by_its_whole_value_has_an_interval_above_nothing(spread: float) -> None:
    where = cluster(device=CPU)
    plan = plan_of(GRAPH, where)
    model = CostModel(graph=GRAPH, cluster=where, machine=MACHINE, profile=profile_of(GRAPH, spread=spread))
    prediction = predict(model, plan, compile_plan(plan, GRAPH), run_name="name").prediction
    assert 0.0 < prediction.step_low_s < prediction.step_s < prediction.step_high_s


def test_a_profiled_step_is_the_schedule_of_its_measured_times() -> None:
    """One rank: four micro-batches of six layers at (2 + 1) + (4 + 1) ms, and six updates of 4 ms."""
    where = cluster(nodes=1, devices=1, device=CPU)
    plan = plan_of(GRAPH, where, pp=1)
    program = compile_plan(plan, GRAPH)
    predicted = predict(CostModel(graph=GRAPH, cluster=where, profile=profile_of(GRAPH)), plan, program)
    assert predicted.prediction.step_s == pytest.approx(6 * (4 * 8e-3 + 4e-3))
    with_overhead = predict(
        CostModel(graph=GRAPH, cluster=where, machine=MACHINE, profile=profile_of(GRAPH)), plan, program
    )
    added = with_overhead.prediction.step_s - predicted.prediction.step_s
    assert added == pytest.approx((4 + 4 + 1) * MACHINE.instruction_s)


def test_a_plan_larger_than_its_cluster_is_refused() -> None:
    plan = plan_of(GRAPH, cluster(), pp=3)
    with pytest.raises(InputError, match="uses 3 ranks, but cluster has 2"):
        price(CostModel(graph=GRAPH, cluster=cluster(nodes=1, devices=2)), compile_plan(plan, GRAPH), plan)


def test_a_kind_without_a_hook_is_refused_and_so_is_one_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, pp=1)
    program = compile_plan(plan, GRAPH)
    code = KINDS.register(Kind(name="unpriced in this test", symbol="U", stream="compute"))
    kind = np.where(program.columns.kind == STEP, code, program.columns.kind)
    with pytest.raises(InputError, match="'unpriced in this test' has no cost hook"):
        price(
            CostModel(graph=GRAPH, cluster=where),
            replace(program, columns=replace(program.columns, kind=kind)),
            plan,
        )
    again = CostOf(kind="forward", hook=takes_nothing)
    monkeypatch.setattr(hooks, "parts", lambda kind: (again,) if kind is CostOf else ())
    with pytest.raises(InputError, match="'forward' has 2 cost hooks"):
        price(CostModel(graph=GRAPH, cluster=where), program, plan)


@given(shapes, st.sampled_from(["zero-0", "zero-1"]))
def test_a_norm_costs_a_meeting_and_reads_what_is_stepped(shape: dict[str, int], sharding: str) -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, **shape).model_copy(update={"sharding": sharding})
    watched = plan.model_copy(update={"methods": CLIPS})
    plain_s, watched_s = (
        predict(CostModel(graph=GRAPH, cluster=where), one, compile_plan(one, GRAPH)).prediction.step_s
        for one in (plan, watched)
    )
    assert watched_s > plain_s
    program = compile_plan(watched, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, watched).costs
    rows = np.flatnonzero(program.columns.kind == NORM)
    steps = np.flatnonzero(program.columns.kind == STEP)
    # It reads gradients, of which the optimizer reads and writes more.
    exchange = Network(cluster=where, machine=None).all_reduce(tuple(range(program.ranks)), 8).seconds
    for row in rows.tolist():
        stepping = costs.occupancy[steps[program.columns.rank[steps] == program.columns.rank[row]]].sum()
        assert exchange * 1e9 - 1 <= costs.occupancy[row] <= exchange * 1e9 + stepping
