"""Threads that finish jobs in order, and what readers of a failed one are told."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from weft.errors import RunError
from weft.run.failures import PeerLostError
from weft.run.work_queue import Done, Job, Promise, WorkQueue, unstamped


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError, PeerLostError), (ConnectionError, PeerLostError), (ValueError, RunError)],
)
def test_any_error_of_a_job_reaches_its_reader(error: type[Exception], kind: type[RunError]) -> None:
    def fail() -> torch.Tensor:
        raise error("no")

    queue = WorkQueue("reduction")
    promise = queue.put(Job(Promise("R0"), fail, unstamped))
    with pytest.raises(RunError, match=r"^R0: reduction failed: no$") as caught:
        promise.wait()
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

    first = queue.put(Job(Promise("R0"), fail, unstamped))
    second = queue.put(Job(Promise("R1"), succeed, unstamped))
    for promise in (first, second):
        with pytest.raises(RunError, match=r"^R0: reduction failed: connection$"):
            promise.wait()
    queue.close()
    assert not ran


def test_a_thread_that_never_returns_does_not_hold_up_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.run.work_queue.JOIN_TIMEOUT_S", 0.05)
    release = threading.Event()

    def block() -> torch.Tensor:
        release.wait()
        return torch.zeros(1)

    queue = WorkQueue("reduction")
    assert queue.idle
    promise = queue.put(Job(Promise("R0"), block, unstamped))
    assert not queue.idle
    begin = time.monotonic()
    queue.close()
    assert time.monotonic() - begin < 5
    release.set()
    assert promise.wait().item() == 0
    assert queue.idle


def test_what_is_there_is_not_waited_for() -> None:
    value = torch.ones(2)
    assert Done(value).wait() is value
