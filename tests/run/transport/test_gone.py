"""Law: whoever waits for another rank stops waiting soon after any rank has died, and names that rank."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from small_jobs import batch_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.run.launch.failures import PeerLostError
from weft.run.launch.flight_recorder import record_path
from weft.run.transport.device_group import DeviceGroup, abort
from weft.run.transport.gone import Gone

LIMIT_S = 30.0


def wait_for_stuck_rank(rank: int, ranks: int, plan: Plan, transport: str, folder: Path) -> str:
    """Rank 1 never steps, the last rank leaves without a farewell. What rank 0 tells, which waits for rank 1.

    Both keep all connections between stages and in groups.
    """
    config, over, record = tiny(), folder / "over", record_path(folder, rank)
    program = make_program(config, plan)
    runtime = make_runtime(rank, config, plan, program, transport=transport, flight_record=record)
    # A caller may have freed a group of its own before another rank is gone.
    freed = dist.new_group()
    # A slower rank may still connect to this one.
    dist.barrier()
    runtime.others.append(DeviceGroup(freed))
    dist.destroy_process_group(freed)
    if rank == ranks - 1:
        runtime._detector.close(farewell=False)
    told = ""
    if rank:
        deadline = time.monotonic() + LIMIT_S
        while not over.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # Otherwise rank 0 waits until this one closes its connections.
        told = "outlasted" if over.exists() else "the other rank still waits"
    else:
        try:
            told = str(runtime.step(0, batch_of(config, plan, 0)).loss)
        except PeerLostError as error:
            told = str(error)
        over.touch()
    return told


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["device", "host"])
@pytest.mark.parametrize("degrees", [{"pp": 3}, {"dp": 3}], ids=str)
def test_a_rank_stops_waiting_when_any_rank_is_gone_and_names_it(
    worker_pool: WorkerPool, tmp_path: Path, degrees: dict[str, int], transport: str
) -> None:
    (tmp_path / "logs").mkdir()
    plan = make_plan(tiny(), schedule="1f1b", micro_batches=6, precision="fp32", **degrees)
    told, *others = worker_pool.run(wait_for_stuck_rank, plan, transport, tmp_path, ranks=3)
    assert others == ["outlasted"] * 2
    assert told.endswith("; rank 2 is gone")
    # The instruction that waited, and its stream.
    assert "rank 0, step 0, instruction" in told
    assert "failed: " in told
    # Of gloo's groups torch records collectives.
    assert "entries" in json.loads(record_path(tmp_path, 0).read_bytes())


def wait_behind_a_broken_connection(rank: int, ranks: int, folder: Path) -> str:
    """Rank 2 closes its connections; rank 1 waits for rank 0, which keeps its own, then cuts the group."""
    group, over = DeviceGroup(dist.new_group()), folder / "over"
    told, taken = "", torch.empty(1)
    # A slower rank may still connect to this one.
    dist.barrier()
    if rank == 2:
        group.cut()
    if rank == 1:
        with pytest.raises(RuntimeError):
            group.receive(taken, 2)
        cutting = threading.Timer(0.5, group.cut)
        cutting.start()
        try:
            group.receive(taken, 0)
        except RuntimeError:
            told = "failed"
        cutting.join()
        over.touch()
    deadline = time.monotonic() + LIMIT_S
    while not over.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return told if over.exists() else "the other rank still waits"


@pytest.mark.processes
def test_a_cut_reaches_every_connection_of_a_group_with_a_broken_one(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    assert worker_pool.run(wait_behind_a_broken_connection, tmp_path, ranks=3) == ["", "failed", ""]


def test_a_step_behind_an_abort_fails_even_if_nothing_in_it_has() -> None:
    gone = Gone()
    with gone.named():
        pass
    gone.add(2)
    # An aborted kernel of NCCL ends like any other.
    with pytest.raises(PeerLostError, match=r"^rank 2 is gone$"), gone.named():
        pass


def test_an_error_of_a_broken_connection_waits_for_the_name_of_the_rank_that_is_gone() -> None:
    gone = Gone()
    telling = threading.Timer(0.05, gone.add, (2,))
    telling.start()
    with pytest.raises(PeerLostError, match=r"^closed; rank 2 is gone$"), gone.named():
        raise PeerLostError("closed")
    with pytest.raises(ValueError, match=r"^own$"), Gone().named():
        raise ValueError("own")


class Communicator:
    """A process group of NCCL that notes its calls."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def abort(self) -> None:
        self.calls.append(f"abort {self.name}")

    def _group_start(self) -> None:
        self.calls.append("together")

    def _group_end(self) -> None:
        self.calls.append("done")


def test_communicators_are_aborted_together() -> None:
    calls: list[str] = []
    groups = [DeviceGroup(Communicator(calls, name), (0, 1), "nccl") for name in "ab"]  # type: ignore[arg-type]
    abort(groups)
    assert calls == ["together", "abort a", "abort b", "done"]
