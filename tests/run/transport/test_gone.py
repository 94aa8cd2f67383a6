"""Law: whoever waits for a rank that is gone stops waiting within a heartbeat or two, and names that rank."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pool import WorkerPool
from small_jobs import batch_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.program.rank_program import part_of
from weft.run.launch.failures import PeerLostError, gone_ranks, tell_gone
from weft.run.launch.heartbeat import beating
from weft.run.record.recorder import Recorder
from weft.run.transport.device_group import DeviceGroup, abort
from weft.run.transport.gone import Gone

LIMIT_S = 30.0


def wait_for_stuck_rank(rank: int, ranks: int, plan: Plan, transport: str, folder: Path) -> str:
    """Rank 1 never steps and keeps its connections. What rank 0 tells once rank 1 is said to be gone."""
    config, over = tiny(), folder / "over"
    program = make_program(config, plan)
    recorder = Recorder(folder, program=part_of(program, rank), plan_id="0" * 16, steps=1)
    runtime = make_runtime(rank, config, plan, program, recorder=recorder, transport=transport)
    told = ""
    if rank == 1:
        deadline = time.monotonic() + LIMIT_S
        while not over.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # Otherwise rank 0 waits until this one closes its connections.
        told = "outlasted" if over.exists() else "the other rank still waits"
    else:
        tell_gone(folder, [1])
        with beating(recorder, runtime.notice, lambda: gone_ranks(folder), runtime.abort):
            try:
                told = str(runtime.step(0, batch_of(config, plan, 0)).loss)
            except PeerLostError as error:
                told = str(error)
        over.touch()
    return told


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["device", "host"])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_rank_stops_waiting_for_one_that_is_gone_and_names_it(
    worker_pool: WorkerPool, tmp_path: Path, degrees: dict[str, int], transport: str
) -> None:
    (tmp_path / "logs").mkdir()
    plan = make_plan(tiny(), schedule="1f1b", precision="fp32", **degrees)
    told, other = worker_pool.run(wait_for_stuck_rank, plan, transport, tmp_path, ranks=2)
    assert other == "outlasted"
    assert told.endswith("; rank 1 is gone")
    # The instruction that waited, and its stream.
    assert "rank 0, step 0, instruction" in told
    assert "failed: " in told


def test_nobody_is_gone_until_somebody_tells(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert gone_ranks(tmp_path) == ()
    tell_gone(tmp_path, [3, 11])
    assert gone_ranks(tmp_path) == (3, 11)
    tell_gone(tmp_path, ())
    tell_gone(tmp_path, ())
    assert gone_ranks(tmp_path) == ()


def test_a_step_behind_an_abort_fails_even_if_nothing_in_it_has() -> None:
    gone = Gone()
    with gone.named():
        pass
    gone.add([2, 1])
    gone.add([1])
    # An aborted kernel of NCCL ends like any other.
    with pytest.raises(PeerLostError, match=r"^ranks 2, 1 are gone$"), gone.named():
        pass


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
