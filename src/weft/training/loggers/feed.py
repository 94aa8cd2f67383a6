"""Loggers on separate threads: the run never waits for them and does not end with them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# One step or one look at held-out samples: "step" and figures by name.
Record = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The description of a run for its loggers.

    `first_step`: the step at which this start begins or resumes; it redoes an earlier start's later records.
    `steps` and `held_out`: the records of earlier starts that stay, in the order of their steps.
    `config`: the run file with every default, and a summary of the plan.
    """

    run_dir: Path
    first_step: int
    steps: tuple[Record, ...]
    held_out: tuple[Record, ...]
    config: Mapping[str, Any]


class Logger(Protocol):
    """A receiver of records; all calls are on one thread, not on the training thread.

    Any error ends the logger and not the run.
    """

    def log(self, record: Record) -> None:
        """Take one record; steps rise. The step of a held-out record is the number of trained steps."""
        ...

    def flush(self) -> None:
        """Show all records to readers; called when no further record waits."""
        ...

    def finish(self) -> None:
        """Close the logger at the end of the run; it is the last call."""
        ...


def is_held_out(record: Record) -> bool:
    """Return True if a record is one of held-out samples."""
    return "held_out_loss" in record


# The limit of records that wait for a slow logger: at a hundred steps per second, a minute and a half.
CAPACITY = 10_000
FINISH_TIMEOUT_S = 30.0


class Feed:
    """One logger behind a bounded queue, opened and called on its own thread.

    Args:
        name: the logger's name in messages.
        make: the function that opens the logger.
        capacity: the limit of waiting records; further ones are counted and dropped.
    """

    def __init__(self, name: str, make: Callable[[], Logger], *, capacity: int = CAPACITY) -> None:
        self.name = name
        self.dropped = 0
        self._make = make
        self._records: queue.Queue[Record | None] = queue.Queue(capacity)
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Put a record into the queue without a wait; drop and count it if the queue is full."""
        if not self._thread.is_alive():
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def take_failure(self) -> str:
        """Return the logger's failure, once; empty if it has none or an earlier call returned it."""
        failure, self._failure = self._failure, ""
        return failure

    def close(self, deadline_s: float) -> bool:
        """Let the logger finish until `time.monotonic()` is `deadline_s`; return True if it has."""
        if not self._thread.is_alive():
            return True
        try:
            self._records.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            logger = self._make()
            while (record := self._records.get()) is not None:
                logger.log(record)
                if self._records.empty():
                    logger.flush()
            logger.finish()
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or "no reason given"
            self._failure = f"{type(error).__name__}: {reason}"


class Feeds:
    """All loggers of a run; `constants` are added to the record of every step."""

    def __init__(
        self,
        feeds: Sequence[Feed] = (),
        constants: Mapping[str, float] | None = None,
        *,
        on_problem: Callable[[str, str], None] = lambda logger, problem: None,
    ) -> None:
        self._feeds = tuple(feeds)
        self._constants = dict(constants or {})
        self._on_problem = on_problem

    def step(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a step's record to all loggers."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._put({**numbers, **self._constants})

    def held_out(self, record: Record) -> None:
        self._put(record)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Let all loggers finish within a common time, and report lost records."""
        deadline_s = time.monotonic() + timeout_s
        for feed in self._feeds:
            finished = feed.close(deadline_s)
            self._tell_failure(feed)
            if not finished:
                self._tell(feed, f"not finished within {timeout_s:g} s; its last records may be lost")
            if feed.dropped:
                self._tell(feed, f"too slow for this run: {feed.dropped} records were not logged")
        self._feeds = ()

    def _put(self, record: Record) -> None:
        for feed in self._feeds:
            feed.put(record)
            self._tell_failure(feed)

    def _tell_failure(self, feed: Feed) -> None:
        if failure := feed.take_failure():
            self._tell(feed, f"failed and is off: {failure}")

    def _tell(self, feed: Feed, problem: str) -> None:
        print(f"warning: logger {feed.name}: {problem}", file=sys.stderr)
        self._on_problem(feed.name, problem)
