"""The choice of the way of messages and sums, and its refusals."""

from __future__ import annotations

import pytest
import torch
from small_plans import make_plan, make_program, tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.errors import InputError
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.program.rank_program import part_of
from weft.run.rank_streams import require_queues
from weft.run.transport.device_messages import ways_of
from weft.run.transport.transports import DeviceTransport, HostTransport, transport_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_cpu_goes_through_host_memory_unless_told_otherwise() -> None:
    assert isinstance(transport_of(None, CPU), HostTransport)
    assert isinstance(transport_of("device", CPU), DeviceTransport)
    assert isinstance(transport_of("host", GPU), HostTransport)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_backend_that_this_torch_lacks_is_refused_or_not_chosen() -> None:
    assert isinstance(transport_of(None, GPU), HostTransport)
    with pytest.raises(InputError, match="'device' needs nccl for cuda, which this torch lacks"):
        transport_of("device", GPU)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_a_gpu_exchanges_in_kernels() -> None:
    chosen = transport_of(None, GPU)
    assert isinstance(chosen, DeviceTransport)
    assert chosen.in_kernels


def test_another_name_is_refused() -> None:
    with pytest.raises(InputError, match="'devise' is not one of device, host"):
        transport_of("devise", CPU)


def test_a_device_that_weft_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match="'device' needs a backend for meta"):
        transport_of("device", torch.device("meta"))


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "breadth-first"])
def test_as_many_communicators_are_opened_as_the_prediction_counts(schedule: str) -> None:
    config, cluster = tiny(), parse_cluster("4xa100-80gb")
    loops = 2 if schedule == "breadth-first" else 1
    plan = make_plan(config, pp=4, loops=loops, schedule=schedule)
    program = make_program(config, plan)
    placed = PlacedPlan(
        program=program, plan=plan, model=CostModel(graph=layer_graph(config), cluster=cluster)
    )
    parts = [part_of(program, rank) for rank in range(4)]
    opened = [len(part.groups) + len(plan.divided_groups(part.rank)) + len(ways_of(part)) for part in parts]
    assert placed.communicators.number.tolist() == opened


def test_a_program_of_more_streams_than_a_device_has_queues_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny()
    part = part_of(make_program(config, make_plan(config, pp=2, loops=2, schedule="breadth-first")), 0)
    # Both payloads go to the other rank and come from it; five queues are for work of the rank alone.
    monkeypatch.setattr("weft.run.rank_streams.HARDWARE_QUEUES", 9)
    require_queues(part)
    monkeypatch.setattr("weft.run.rank_streams.HARDWARE_QUEUES", 8)
    with pytest.raises(InputError, match="'device' needs 9 streams; a device has 8 queues"):
        require_queues(part)
