"""Messages: order, tags, times, and errors that name the instruction and the peer."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, WorkerPool

from weft.errors import RunError
from weft.run.channels import Channels, Handle, Job, WorkQueue
from weft.run.failures import PeerLostError

pytestmark = pytest.mark.processes

TAGS = {"activation": 1, "gradient": 2}


def exchange(rank: int, ranks: int) -> tuple[list[float], list[float], int]:
    """Both ranks send before they receive, two kinds at once, receiving the kinds in another order."""
    channels = Channels(dist.new_group(), TAGS)
    peer, times = 1 - rank, []

    def stamp(start_ns: int, end_ns: int) -> None:
        times.append((start_ns, end_ns))

    def message(payload: str, number: int) -> torch.Tensor:
        return torch.full((3,), float(TAGS[payload] * 100 + number))

    sent = [
        channels.send(message(payload, number), peer, payload, "SF", stamp)
        for number in range(4)
        for payload in TAGS
    ]
    received = {
        payload: [channels.receive((3,), torch.float32, peer, payload, "RF", stamp) for _ in range(4)]
        for payload in reversed(TAGS)
    }
    values = {
        payload: [handle.wait()[0].item() for handle in handles] for payload, handles in received.items()
    }
    for handle in sent:
        handle.wait()
    channels.close()
    assert all(end_ns >= start_ns > 0 for start_ns, end_ns in times)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("weft-")]
    assert not left, left
    return values["activation"], values["gradient"], len(times)


def lose_peer(rank: int, ranks: int, notes: Path) -> None:
    channels = Channels(dist.new_group(), TAGS)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    labels = ("RF1.0", "RF1.1")
    handles = [
        channels.receive((2,), torch.float32, 1, "activation", label, lambda start, end: None)
        for label in labels
    ]
    for handle in handles:
        try:
            handle.wait()
        except PeerLostError as error:
            with notes.open("a") as file:
                print(error, file=file)


def test_order_and_kinds_are_kept(worker_pool: WorkerPool) -> None:
    for activations, gradients, stamps in worker_pool.run(exchange, ranks=2):
        assert activations == [100.0, 101.0, 102.0, 103.0]
        assert gradients == [200.0, 201.0, 202.0, 203.0]
        assert stamps == 16


def test_a_lost_peer_is_named_with_the_instruction(worker_pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        worker_pool.run(lose_peer, tmp_path / "notes", ranks=2)
    lines = (tmp_path / "notes").read_text().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("RF1.0: receive of activation from rank 1 failed: ") for line in lines)


@pytest.mark.parametrize(("error", "kind"), [(RuntimeError, PeerLostError), (ValueError, RunError)])
def test_any_error_of_a_job_reaches_its_reader(error: type[Exception], kind: type[RunError]) -> None:
    def fail() -> torch.Tensor:
        raise error("no")

    queue = WorkQueue("reduction")
    handle = queue.put(Job(Handle("R0"), fail, lambda start, end: None))
    with pytest.raises(RunError, match=r"^R0: reduction failed: no$") as caught:
        handle.wait()
    queue.close()
    assert type(caught.value) is kind


def test_nothing_behind_a_failed_job_is_trusted() -> None:
    queue = WorkQueue("reduction")
    ran: list[int] = []

    def fail() -> torch.Tensor:
        raise RuntimeError("connection\nclosed")

    def succeed() -> torch.Tensor:
        ran.append(1)
        return torch.zeros(1)

    first = queue.put(Job(Handle("R0"), fail, lambda start, end: None))
    second = queue.put(Job(Handle("R1"), succeed, lambda start, end: None))
    for handle in (first, second):
        with pytest.raises(RunError, match=r"^R0: reduction failed: connection$"):
            handle.wait()
    queue.close()
    assert not ran


def test_a_thread_that_never_returns_does_not_hold_up_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.run.channels.JOIN_TIMEOUT_S", 0.05)
    release = threading.Event()

    def block() -> torch.Tensor:
        release.wait()
        return torch.zeros(1)

    queue = WorkQueue("reduction")
    handle = queue.put(Job(Handle("R0"), block, lambda start, end: None))
    begin = time.monotonic()
    queue.close()
    assert time.monotonic() - begin < 5
    release.set()
    assert handle.wait().item() == 0
