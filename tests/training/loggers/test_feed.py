"""Feeds: nothing a logger does reaches the run, and what is lost is said."""

import threading
import time
from collections.abc import Callable

import pytest

from weft.training.loggers.feed import Feed, Feeds, Record


class Kept:
    """Keeps what it is given, after an open gate."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.records: list[Record] = []
        self.flushed = 0
        self.finished = False
        self.threads: set[int] = set()
        self._gate = gate

    def log(self, record: Record) -> None:
        if self._gate is not None:
            self._gate.wait(20)
        self.threads.add(threading.get_ident())
        self.records.append(record)

    def flush(self) -> None:
        self.flushed = len(self.records)

    def finish(self) -> None:
        self.finished = True


class Broken(Kept):
    """Fails at the second record."""

    def log(self, record: Record) -> None:
        super().log(record)
        if len(self.records) == 2:
            raise ValueError("no\nroom")


def feeds_of(*feeds: Feed) -> tuple[Feeds, list[tuple[str, str]]]:
    problems: list[tuple[str, str]] = []
    return Feeds(
        feeds, {"predicted_step_s": 0.5}, on_problem=lambda *problem: problems.append(problem)
    ), problems


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("waited for 10 s")


def test_records_arrive_in_their_order_on_another_thread() -> None:
    kept = Kept()
    feeds, problems = feeds_of(Feed("kept", lambda: kept))
    for step in range(100):
        feeds.step({"step": step})
    feeds.held_out({"step": 100, "held_out_loss": 1.0})
    feeds.close()
    assert kept.records[:-1] == [{"step": step, "predicted_step_s": 0.5} for step in range(100)]
    assert kept.records[-1] == {"step": 100, "held_out_loss": 1.0}
    assert kept.finished
    assert threading.get_ident() not in kept.threads
    assert problems == []


@pytest.mark.parametrize("failing", [Broken, lambda: __import__("no_such_package"), lambda: exit(3)])
def test_a_logger_that_fails_is_off_and_says_so_once(failing, capsys) -> None:
    kept = Kept()
    feeds, problems = feeds_of(Feed("broken", failing), Feed("kept", lambda: kept))
    for step in range(5):
        feeds.step({"step": step})
    feeds.close()
    feeds.close()
    assert len(kept.records) == 5
    assert [name for name, _ in problems] == ["broken"]
    assert problems[0][1].startswith("failed and is off: ")
    assert capsys.readouterr().err == f"warning: logger broken: {problems[0][1]}\n"


def test_the_failure_is_one_line() -> None:
    feeds, problems = feeds_of(Feed("broken", Broken))
    for step in range(2):
        feeds.step({"step": step})
    feeds.close()
    assert problems == [("broken", "failed and is off: ValueError: no room")]


def test_a_full_queue_drops_records_and_counts_them() -> None:
    gate = threading.Event()
    kept = Kept(gate)
    feed = Feed("slow", lambda: kept, capacity=3)
    feeds, problems = feeds_of(feed)
    feeds.step({"step": 0})
    wait_for(lambda: feed._records.empty())
    for step in range(1, 10):
        feeds.step({"step": step})
    assert feed.dropped == 6
    gate.set()
    feeds.close()
    assert [record["step"] for record in kept.records] == [0, 1, 2, 3]
    assert problems == [("slow", "too slow for this run: 6 records were not logged")]


@pytest.mark.parametrize("capacity", [1, 10])
def test_a_logger_that_hangs_is_left_behind(capacity: int) -> None:
    gate = threading.Event()
    feeds, problems = feeds_of(Feed("stuck", lambda: Kept(gate), capacity=capacity))
    for step in range(4):
        feeds.step({"step": step})
    feeds.close(timeout_s=0.05)
    gate.set()
    assert problems[0] == ("stuck", "not finished within 0.05 s; its last records may be lost")


def test_a_logger_is_flushed_when_nothing_waits() -> None:
    kept = Kept()
    feeds, _ = feeds_of(Feed("kept", lambda: kept))
    feeds.step({"step": 0})
    wait_for(lambda: kept.flushed == 1)
    feeds.close()


def test_a_failed_logger_with_a_full_queue_is_not_waited_for() -> None:
    gate = threading.Event()

    def fail() -> Kept:
        gate.wait(20)
        raise ValueError("no room")

    feed = Feed("broken", fail, capacity=1)
    feed.put({"step": 0})
    gate.set()
    wait_for(lambda: not feed._thread.is_alive())
    assert feed.close(time.monotonic() + 60)
    assert feed.take_failure()


def test_no_loggers_cost_nothing() -> None:
    threads = threading.active_count()
    feeds = Feeds()
    feeds.step({"step": 0})
    feeds.close()
    assert threading.active_count() == threads
