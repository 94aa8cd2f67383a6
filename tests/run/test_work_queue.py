"""Threads that finish work in order, and what readers of a failed one are told."""

from __future__ import annotations

import threading
import time

import pytest

from weft.errors import RunError
from weft.run.launch.failures import PeerLostError
from weft.run.work_queue import WorkQueue


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError, PeerLostError), (ConnectionError, PeerLostError), (ValueError, RunError)],
)
def test_any_error_of_work_reaches_who_waits(error: type[Exception], kind: type[RunError]) -> None:
    def fail() -> None:
        raise error("no")

    queue = WorkQueue("reduction")
    completion = queue.run("R0", fail)
    with pytest.raises(RunError, match=r"^R0: reduction failed: no$") as caught:
        completion.wait()
    queue.close()
    assert type(caught.value) is kind


def test_nothing_behind_failed_work_is_trusted() -> None:
    queue = WorkQueue("reduction")
    ran: list[int] = []

    def fail() -> None:
        raise RuntimeError("connection\nclosed")

    first, second = queue.run("R0", fail), queue.run("R1", lambda: ran.append(1))
    for completion in (first, second):
        with pytest.raises(RunError, match=r"^R0: reduction failed: connection$"):
            completion.wait()
        assert completion.times is None
    queue.close()
    assert not ran


def test_a_thread_that_never_returns_does_not_hold_up_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.run.work_queue.JOIN_TIMEOUT_S", 0.05)
    release = threading.Event()
    queue = WorkQueue("reduction")
    completion = queue.run("R0", release.wait)
    assert completion.times is None
    begin = time.monotonic()
    queue.close()
    assert time.monotonic() - begin < 5
    release.set()
    completion.wait()
    assert completion.times is not None


def test_a_queue_without_work_has_no_thread() -> None:
    queue = WorkQueue("idle")
    queue.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-idle"]
