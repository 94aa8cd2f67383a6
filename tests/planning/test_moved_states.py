"""The states that devices must receive: what ranks have, what they lack, and who sends it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import make_plan, tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.optimizers import MUON
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.moved_states import (
    CHECKPOINT_BYTES_PER_S,
    Holdings,
    MovedStates,
    holdings,
    moved_states,
    on_equal_devices,
    uncounted,
)
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.memory import plan_states, resident_states, stage_parameters
from weft.predict.cost.network import Network

RANKS = 8
NETWORK = Network(cluster=parse_cluster("4xt4+4xv100-16gb"))


@st.composite
def plans(draw: st.DrawFn, tied: bool | None = None) -> tuple[Plan, LayerGraph]:
    """Draw a plan of up to eight ranks with any sharding, and its model."""
    config = tiny(tied=draw(st.booleans()) if tied is None else tied)
    pp, dp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4)]))
    plan = make_plan(config, pp=pp, dp=dp, precision=draw(st.sampled_from(["fp32", "bf16"])))
    sharding = draw(st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]))
    return plan.model_copy(update={"sharding": sharding}), layer_graph(config)


def bytes_of(held: Holdings, rank: int) -> int:
    return sum((last - first) * piece.element_bytes for piece, (first, last) in held.get(rank, {}).items())


def moved(held: Holdings, plan: Plan, graph: LayerGraph) -> MovedStates:
    return moved_states(held, holdings(plan, graph), RANKS, NETWORK)


@given(plans(tied=False))
def test_a_rank_has_the_states_that_the_memory_model_counts(given_plan: tuple[Plan, LayerGraph]) -> None:
    plan, graph = given_plan
    stages = [
        (
            np.array([copy.ranks[0] for copy in stage.replicas]),
            stage_parameters(graph, stage.layers, plan.shape(index)),
            plan.sharers(index),
        )
        for index, stage in enumerate(plan.stages)
    ]
    resident = resident_states(stages, plan.ranks, plan_states(plan), plan.sharding)
    counted = holdings(plan, graph)
    for rank in range(plan.ranks):
        expected = int(resident.optimizer_states[rank] + resident.weights[rank])
        # The last shard of a stage is padded.
        assert 0 <= expected - bytes_of(counted, rank) < 16 * len(plan.stages) * plan.replicas[0]


@given(plans(), plans())
def test_nothing_moves_to_who_has_it_and_all_to_who_has_nothing(
    one: tuple[Plan, LayerGraph], other: tuple[Plan, LayerGraph]
) -> None:
    (plan, graph), (next_plan, next_graph) = one, other
    held = holdings(plan, graph)
    assert moved(held, plan, graph) == MovedStates(received_bytes=(0,) * RANKS, lost_bytes=0, seconds=0.0)
    needed = holdings(next_plan, next_graph)
    anew = moved({}, next_plan, next_graph)
    assert list(anew.received_bytes) == [bytes_of(needed, rank) for rank in range(RANKS)]
    assert anew.lost_bytes == anew.total_bytes
    assert anew.seconds == pytest.approx(max(anew.received_bytes) / CHECKPOINT_BYTES_PER_S)


@settings(deadline=None)
@given(plans(), st.data())
def test_only_elements_that_no_device_has_are_lost(
    given_plan: tuple[Plan, LayerGraph], data: st.DataObject
) -> None:
    """Counted element by element, for another plan of the same model."""
    plan, graph = given_plan
    gone = data.draw(st.sets(st.integers(0, plan.ranks - 1), max_size=3))
    held = {rank: pieces for rank, pieces in holdings(plan, graph).items() if rank not in gone}
    next_plan = make_plan(tiny(tied=bool(graph.tied)), pp=2, dp=2, precision=plan.precision)
    found, lost = moved(held, next_plan, graph), 0
    there: dict[Any, set[int]] = {}
    for pieces in held.values():
        for piece, cut in pieces.items():
            there.setdefault(piece, set()).update(range(*cut))
    for rank, pieces in holdings(next_plan, graph).items():
        received = 0
        for piece, cut in pieces.items():
            missing = {*range(*cut)} - {*range(*held.get(rank, {}).get(piece, (0, 0)))}
            received += len(missing) * piece.element_bytes
            lost += len(missing - there.get(piece, set())) * piece.element_bytes
        assert found.received_bytes[rank] == received
    assert found.lost_bytes == lost


def test_several_receivers_have_several_senders() -> None:
    """Two of four replicas are new. One sender for both would take twice as long."""
    config = tiny()
    graph, network = layer_graph(config), Network(cluster=parse_cluster("4xt4"))
    two, four = (holdings(make_plan(config, dp=dp, micro_batches=dp), graph) for dp in (2, 4))
    found = moved_states(two, four, 4, network)
    size = bytes_of(four, 3)
    assert found.received_bytes == (0, 0, size, size)
    one_s = sum(network.message_s(0, 2, size))
    assert one_s <= found.seconds < 1.5 * one_s


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_equal_devices_take_the_places_whose_states_they_have(order: list[int]) -> None:
    problem = problem_of(model="gpt-1m", on="4xt4", global_batch=4)
    plan = _of_stages(problem)
    turned = plan.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(update={"replicas": (copy.model_copy(update={"ranks": (order[place],)}),)})
                for place, stage in enumerate(plan.stages)
                for copy in stage.replicas
            )
        }
    )
    held = holdings(plan, problem.job.graph)
    assert on_equal_devices(turned, problem.job, held) == plan


def test_unlike_devices_keep_their_places() -> None:
    problem = problem_of(model="gpt-1m", on="2xt4+2xv100-16gb", global_batch=4, precision="fp16")
    plan = _of_stages(problem)
    swapped = {0: 2, 1: 3, 2: 0, 3: 1}
    held = {swapped[rank]: pieces for rank, pieces in holdings(plan, problem.job.graph).items()}
    assert on_equal_devices(plan, problem.job, held) == plan


def _of_stages(problem: Problem) -> Plan:
    """Return a plan of four stages, one on each device."""
    layers = len(problem.job.graph.layers)
    plan = make_plan(problem.model, pp=4)
    assert Counter(layer for stage in plan.stages for layer in stage.layers) == Counter(range(layers))
    return plan


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"island": 2}, "plan: island: 2: shards of islands are not counted by rank"),
        ({"optimizer": MUON}, r"plan: optimizer: matrices have other states .* \(nearest valid: adamw\)"),
    ],
)
def test_states_that_are_not_counted_are_refused(changes: dict[str, Any], line: str) -> None:
    plan = make_plan(tiny(), dp=4).model_copy(update=changes)
    with pytest.raises(InputError, match=line):
        holdings(plan, layer_graph(tiny()))


def test_divided_layers_are_refused() -> None:
    plan = make_plan(tiny(), pp=2, degrees=(2, 1))
    assert [str(one) for one in uncounted(plan)] == [
        "plan: mesh: replicas of 2 ranks: parts of layers are not counted by rank, which tensor, context and "
        "expert ranks have (nearest valid: 1)"
    ]
