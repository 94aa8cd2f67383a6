"""Laws of whole predicted steps: units, conservation, monotony, and what is alike counts alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict.cost.machines import GPU
from predict.cost.steps import GRAPH, SLOW, faster, machine, plans, step_of

from weft.describe.amount import Shape
from weft.describe.cluster import Link
from weft.describe.plan import Plan, Replica
from weft.planning.compile import compile_plan
from weft.predict.cost.layer_times import KERNEL_SPEEDS, MATMUL_SHARE, length_factor
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    MESSAGES,
)

COMPUTATIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
# Nothing takes any time but products, at a speed for which nanoseconds are nothing.
FREE = Link(1e30, 0.0)
PRODUCTS_ONLY = machine(
    device=replace(GPU, memory_bytes_per_s=1e30, flops_per_s={"fp32": 1e9}, launch_s=0.0),
    inside=FREE,
    between=FREE,
)


@settings(max_examples=10)
@given(plans(), st.floats(0.1, 10.0))
def test_a_machine_faster_in_everything_is_as_much_faster(plan: Plan, factor: float) -> None:
    step_s = step_of(plan, SLOW).prediction.step_s
    assert step_of(plan, faster(SLOW, factor)).prediction.step_s * factor == pytest.approx(step_s, rel=1e-6)


@settings(max_examples=10)
@given(plans(PRODUCTS_ONLY, recompute=("none", "full")))
def test_instructions_compute_what_the_model_does_and_a_third_more_where_it_is_recomputed(plan: Plan) -> None:
    """However it is divided: in seconds of kernels at their speeds, so through stages, lanes and prices."""
    program = compile_plan(plan, GRAPH)
    occupancy = price(CostModel(graph=GRAPH, cluster=PRODUCTS_ONLY), program, plan).costs.occupancy
    busy_s = sum(occupancy[program.columns.kind == kind].sum() for kind in COMPUTATIONS) * 1e-9
    whole = Shape(plan.global_batch, plan.sequence)
    alone_s = sum(
        matmul.flops(whole)
        / (1e9 * MATMUL_SHARE * KERNEL_SPEEDS[matmul.kernel] * length_factor(matmul.kernel, whole.sequence))
        for layer in GRAPH.layers
        for work in (layer.forward, layer.backward_input, layer.backward_weight)
        for matmul in work.matmuls
    )
    again = 4 / 3 if plan.stages[0].recompute == "full" else 1.0
    assert busy_s == pytest.approx(alone_s * again, rel=1e-6)


@settings(max_examples=10)
@given(plans())
def test_every_byte_that_is_sent_is_received(plan: Plan) -> None:
    columns = compile_plan(plan, GRAPH).columns
    for send, receive in MESSAGES:
        moved: Counter[tuple[int, ...]] = Counter()
        for kind, sign in ((send, 1), (receive, -1)):
            mine = columns.kind == kind
            ends = (columns.rank[mine], columns.peer[mine])[::sign]
            for *key, size in zip(*ends, columns.micro_batch[mine], columns.bytes[mine], strict=True):
                moved[tuple(key)] += sign * int(size)
        assert set(moved.values()) <= {0}


@settings(max_examples=10)
@given(plans(), st.sampled_from(["peak", "memory", "launch", "inside", "between"]), st.floats(1.1, 8.0))
def test_nothing_that_gets_faster_makes_a_step_longer(plan: Plan, what: str, factor: float) -> None:
    quick = faster(SLOW, factor)
    (group,), (other,) = SLOW.groups, quick.groups
    if what in ("peak", "memory", "launch"):
        field = {"peak": "flops_per_s", "memory": "memory_bytes_per_s", "launch": "launch_s"}[what]
        device = replace(group.device, **{field: getattr(other.device, field)})
        better = replace(SLOW, groups=(replace(group, device=device),))
    elif what == "inside":
        better = replace(SLOW, groups=(replace(group, link=other.link),))
    else:
        better = replace(SLOW, links=quick.links)
    step_s = step_of(plan, SLOW).prediction.step_s
    assert step_of(plan, better).prediction.step_s <= step_s * (1 + 1e-9)


def relabelled(plan: Plan, place: dict[int, int]) -> Plan:
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    Replica(
                        ranks=tuple(sorted(place[rank] for rank in one.ranks)),
                        micro_batches=one.micro_batches,
                    )
                    for one in stage.replicas
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


@settings(max_examples=10)
@given(plans(), st.permutations(range(3)), st.permutations(range(4)))
def test_equal_devices_can_change_places(plan: Plan, nodes: list[int], devices: list[int]) -> None:
    """Nodes among each other, and the devices of all nodes alike."""
    place = {rank: 4 * nodes[rank // 4] + devices[rank % 4] for rank in range(12)}
    moved = relabelled(plan, place)
    before, after = (step_of(one, SLOW).prediction for one in (plan, moved))
    assert after.step_s == pytest.approx(before.step_s, rel=1e-9)
    peaks = [*before.peak_bytes, *[0] * 12]
    for rank, peak in enumerate(after.peak_bytes):
        source = next(one for one, to in place.items() if to == rank)
        assert peak == peaks[source]


@settings(max_examples=10)
@given(plans())
def test_replicas_can_change_numbers(plan: Plan) -> None:
    stages = tuple(stage.model_copy(update={"replicas": stage.replicas[::-1]}) for stage in plan.stages)
    swapped = plan.model_copy(update={"stages": stages})
    before, after = (step_of(one, SLOW).prediction for one in (plan, swapped))
    assert after.step_s == pytest.approx(before.step_s, rel=1e-9)
    assert after.peak_bytes == before.peak_bytes


@settings(max_examples=10)
@given(plans())
def test_no_link_of_a_node_carries_more_than_the_step_has_time_for(plan: Plan) -> None:
    predicted = step_of(plan, SLOW)
    columns = compile_plan(plan, GRAPH).columns
    leaving = Counter[tuple[int, int, bool]]()
    for send, _ in MESSAGES:
        mine = columns.kind == send
        for rank, peer, size in zip(columns.rank[mine], columns.peer[mine], columns.bytes[mine], strict=True):
            if rank // 4 != peer // 4:
                leaving[int(rank) // 4, True] += int(size)
                leaving[int(peer) // 4, False] += int(size)
    (link,) = SLOW.links.values()
    busiest = max(leaving.values(), default=0)
    assert predicted.simulation.first_step_s >= busiest / link.bytes_per_s * (1 - 1e-9)
