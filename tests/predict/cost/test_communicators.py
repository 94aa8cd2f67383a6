"""Laws of the memory of communicators: one for each group, and each direction and payload of a pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import MODEL
from predict.plans import plan_of

import weft
from weft.describe.cluster_file import parse_cluster
from weft.describe.device import RESERVE_BYTES
from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.moves.layout_of_plan import layout_of
from weft.planning.compile import compile_folded, compile_plan
from weft.planning.planners.base import Candidate, Verdict
from weft.planning.planners.simulated import judged
from weft.predict.cost.communicators import (
    BUFFER_BYTES,
    FEWEST_CHANNELS,
    MOST_CHANNELS,
    Communicators,
    channels,
)
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.program.kinds import message_kinds
from weft.program.program import Program
from weft.program.rank_program import part_of

GRAPH = layer_graph(MODEL)
ON = "8xa100-80gb"


def counted(plan: Plan, program: Program, on: str = ON) -> Communicators:
    model = CostModel(graph=GRAPH, cluster=parse_cluster(on))
    return PlacedPlan(program=program, plan=plan, model=model).communicators


def opened(plan: Plan, program: Program, rank: int) -> int:
    """The communicators that a rank opens, from its own part of the program."""
    part = part_of(program, rank)
    ways = {(kinds, kind, peer) for kinds in message_kinds() for kind in kinds for peer in part.peers(kind)}
    return len(part.groups) + len(plan.divided_groups(rank)) + len(ways)


@given(
    degrees=st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    sharding=st.sampled_from(["zero-0", "zero-1"]),
)
def test_each_group_and_each_way_of_messages_is_counted_once(
    degrees: tuple[int, int], schedule: str, sharding: str
) -> None:
    pp, dp = degrees
    plan = plan_of(GRAPH, parse_cluster(ON), pp=pp, dp=dp, schedule=schedule)
    plan = plan.model_copy(update={"sharding": sharding})
    program = compile_plan(plan, GRAPH)
    found = counted(plan, program)
    assert found.number.tolist() == [opened(plan, program, rank) for rank in range(plan.ranks)]
    assert (found.held_bytes > 0).tolist() == (found.number > 0).tolist()
    folded = counted(plan, compile_folded(plan, GRAPH, parse_cluster(ON)))
    assert [each.tolist() for each in folded] == [each.tolist() for each in found]


def test_messages_of_both_directions_are_one_communicator_each() -> None:
    plan = plan_of(GRAPH, parse_cluster("2xa100-80gb"), pp=2, dp=1, schedule="1f1b")
    assert counted(plan, compile_plan(plan, GRAPH), "2xa100-80gb").number.tolist() == [2, 2]


@given(st.floats(1e6, 1e13), st.floats(1e6, 1e13))
def test_wider_links_have_no_fewer_channels(first: float, second: float) -> None:
    narrow, wide = sorted((first, second))
    assert FEWEST_CHANNELS <= channels(narrow) <= channels(wide) <= MOST_CHANNELS


@pytest.mark.parametrize(("ranks", "measured_bytes"), [(2, 544 * 2**20), (4, 688 * 2**20)])
def test_a_collective_takes_what_four_a100_showed(ranks: int, measured_bytes: int) -> None:
    plan = plan_of(GRAPH, parse_cluster(f"{ranks}xa100-80gb"), pp=1, dp=ranks)
    found = counted(plan, compile_plan(plan, GRAPH), f"{ranks}xa100-80gb")
    assert found.number.tolist() == [1] * ranks
    assert found.held_bytes[0] % BUFFER_BYTES == 0
    assert found.held_bytes.tolist() == pytest.approx([measured_bytes] * ranks, rel=0.15)


def test_a_job_shows_communicators_beside_its_reserve_and_has_less_memory() -> None:
    job = weft.plan(model="gpt-1m", on="8xa100-80gb", global_batch=8, sequence=64, pp=2, tp=2, dp=2).job
    device = job.problem.job.cluster.device_of(0)
    held = job.communicators.held_bytes.tolist()
    assert min(held) > 0
    # Of gradients, of divided layers, and of messages to and fro.
    assert job.communicators.number.tolist() == [opened(job.plan, job.program, rank) for rank in range(8)]
    assert job.unreserved_bytes == [device.memory_bytes - RESERVE_BYTES] * 8
    assert job.usable_bytes == [device.memory_bytes - RESERVE_BYTES - one for one in held]
    assert job.predicted.prediction.communicator_bytes == job.prediction.communicator_bytes == tuple(held)
    *tensors, buffers, reserve = job.memory_parts(0)
    assert tensors == job.peak_parts(0)
    assert (buffers.name, buffers.value) == (f"communicators ({job.communicators.number[0]})", held[0])
    assert reserve.value == RESERVE_BYTES


def test_a_plan_without_communicators_has_all_but_the_reserve() -> None:
    job = weft.plan(model="gpt-1m", on="1xa100-80gb", global_batch=8, sequence=64).job
    assert job.prediction.communicator_bytes == ()
    assert job.usable_bytes == job.unreserved_bytes == [job.memory_bytes[0] - RESERVE_BYTES]
    assert job.memory_parts(0)[-1].name == "reserve"


def test_a_plan_must_fit_beside_its_communicators_and_their_interval() -> None:
    job = weft.plan(model="gpt-1m", on="2xa100-80gb", global_batch=8, sequence=64, pp=1, dp=2).job
    [group] = job.problem.job.cluster.groups
    [needed_bytes] = set(job.prediction.needs_at(0.02))
    # The tiny model's own interval is small beside that of 503 MB.
    held_bytes = int(job.communicators.held_bytes[0])
    assert needed_bytes - max(job.prediction.peak_bytes) - held_bytes > 0.5 * held_bytes

    def fits(usable_bytes: int) -> bool:
        device = replace(group.device, memory_bytes=usable_bytes + RESERVE_BYTES)
        cluster = replace(job.problem.job.cluster, groups=(replace(group, device=device),))
        problem = replace(job.problem, job=replace(job.problem.job, cluster=cluster))
        asked = Candidate(layout=layout_of(job.plan), verdict=Verdict.PRUNED, reason="")
        return judged(problem, asked, job.plan).verdict is Verdict.FITS

    assert fits(needed_bytes)
    assert not fits(needed_bytes - 1)


@pytest.mark.parametrize("given_bytes", [None, 2**30])
def test_a_given_reserve_and_a_cpu_have_room_for_communicators(given_bytes: int | None) -> None:
    where = parse_cluster("2xa100-80gb")
    [group] = where.groups
    device = replace(group.device, synchronous=given_bytes is None, reserve_bytes=given_bytes)
    where = replace(where, groups=(replace(group, device=device),))
    plan = plan_of(GRAPH, where, pp=1, dp=2)
    program = compile_plan(plan, GRAPH)
    placed = PlacedPlan(program=program, plan=plan, model=CostModel(graph=GRAPH, cluster=where))
    found = placed.communicators
    assert found.number.tolist() == [1, 1]
    assert not np.any(found.held_bytes)
