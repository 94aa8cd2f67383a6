"""The groups of a rank: it opens its own alone, and they compute what torch's groups of all ranks do."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from small_plans import make_plan, tiny

from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.planning.compile import compile_part, compile_plan
from weft.run.transport.host_group import HostGroup
from weft.run.transport.mesh import open_groups
from weft.run.transport.transports import HostTransport

pytestmark = pytest.mark.processes

TIMEOUT = timedelta(seconds=30)
CONFIG = tiny()


def islands_of_two() -> Plan:
    """Four replicas in two islands, of two stages each: every rank is in four groups of different ranks."""
    plan = make_plan(CONFIG, dp=4, loops=2, schedule="breadth-first")
    return plan.model_copy(update={"sharding": "zero-1", "island": 2})


def exchange(rank: int, ranks: int) -> list[list[float]]:
    """What members of the program's groups add up and exchange, twice, by weft's groups and by torch's."""
    plan, graph = islands_of_two(), layer_graph(CONFIG)
    part, whole = compile_part(plan, graph, rank), compile_plan(plan, graph)
    theirs = [dist.new_group(list(group)) for group in whole.groups]
    values = torch.randn(64, generator=torch.Generator().manual_seed(rank))
    found = []
    for generation in range(2):
        groups = open_groups(plan, part, HostTransport(), generation=generation, timeout=TIMEOUT)
        assert sorted(groups.collective) == [n for n, group in enumerate(whole.groups) if rank in group]
        for number, group in groups.collective.items():
            both = []
            for one in (group, HostGroup(theirs[number])):
                total, taken, gathered = values.clone(), torch.empty(64), torch.empty(64 * one.size)
                one.all_reduce(total)
                one.all_to_all(taken, values)
                one.all_gather(gathered, values)
                one.broadcast(first := values.clone(), whole.groups[number][-1])
                both.append((one.place, one.size, torch.cat([total, taken, gathered, first]).tolist()))
            assert both[0] == both[1]
            found.append(both[0][2])
        groups.close()
    return found


def test_a_rank_opens_its_own_groups_and_they_compute_what_those_of_all_ranks_do(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(exchange, ranks=4)
    assert all(len(found) == 4 for found in results)


def in_different_numbers_of_groups(rank: int, ranks: int) -> list[float]:
    """Rank 0 is in three groups before it meets rank 3, which is in none."""
    named = {"a": (0, 1), "b": (0, 1, 2), "c": (2, 0), "d": (0, 3)}
    groups = {
        name: HostGroup.open(name, members, TIMEOUT) for name, members in named.items() if rank in members
    }
    found = []
    for group in groups.values():
        total = torch.tensor([10.0**rank])
        group.all_reduce(total)
        found.append(total.item())
        group.close()
    return found


def test_ranks_of_different_numbers_of_groups_meet(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(in_different_numbers_of_groups, ranks=4)
    assert found == [[11.0, 111.0, 101.0, 1001.0], [11.0, 111.0], [111.0, 101.0], [1001.0]]


def test_groups_inside_a_replica_are_those_of_the_rank() -> None:
    plan = make_plan(CONFIG, pp=2)
    ranks = ((0, 1, 2, 3), (4, 5, 6, 7))
    stages = tuple(
        stage.model_copy(update={"replicas": (stage.replicas[0].model_copy(update={"ranks": held}),)})
        for stage, held in zip(plan.stages, ranks, strict=True)
    )
    plan = plan.model_copy(update={"stages": stages, "mesh": {"pp": 2, "cp": 2, "tp": 2}})
    found = [plan.divided_groups(rank) for rank in range(8)]
    assert found[0] == [(0, 1), (0, 2)]
    assert found[7] == [(5, 7), (6, 7)]
    assert all(rank in group for rank, groups in enumerate(found) for group in groups)
