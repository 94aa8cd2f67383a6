"""Agreement between the ranks of a job: a failure of one rank, or a request to one, reaches all ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import InputError, RunError, Violation
from weft.run.launch.failures import PeerLostError, disk_problem

# If ranks have received different signals, the later one here wins. A user's Ctrl-C reaches the ranks as
# SIGINT, and through their launcher as SIGTERM too.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def together(
    group: dist.ProcessGroup | None = None, meet: Callable[[], None] | None = None
) -> Iterator[None]:
    """Raise a refusal or failure of one rank in the block on all ranks; every rank enters the block.

    The block must not communicate with other ranks, because a failing rank would leave them waiting. A
    separate thread needs a separate `group`. If ranks may be far apart, `meet` waits for them at the end.

    Raises:
        InputError, RunError: the error of the lowest failing rank, on every rank.
    """
    refused: tuple[Violation, ...] = ()
    failed = ""
    try:
        yield
    except InputError as error:
        refused = error.violations
    except RunError as error:
        failed = str(error)
    except OSError as error:
        failed = disk_problem(dist.get_rank(), error)
    if meet is not None:
        meet()
    told = gather([[astuple(one) for one in refused], failed], group)
    if any(violations or text for violations, text in told):
        # A rank that ends now would cut the connections of one that has not read all of this.
        with suppress(RuntimeError):
            dist.barrier(group)
    for violations, text in told:
        if violations:
            raise InputError([Violation(*fields) for fields in violations])
        if text:
            raise RunError(text)


@contextmanager
def meeting_peers() -> Iterator[None]:
    """Raise torch's errors in a block of collective calls as the loss of another rank.

    Raises:
        PeerLostError: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise PeerLostError(f"rank {dist.get_rank()} lost another rank: {reason}") from error


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order; values are small and in JSON.

    torch's own call would send pickles, which can call any function if an attacker alters them.
    """
    ranks = dist.get_world_size(group)
    own = _packed(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    with meeting_peers():
        dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
        room = max(int(size) for size in sizes)
        found = [torch.zeros(room, dtype=torch.uint8) for _ in range(ranks)]
        dist.all_gather(found, torch.cat([own, own.new_zeros(room - len(own))]), group=group)
    return [_unpacked(content[: int(size)]) for content, size in zip(found, sizes, strict=True)]


def from_first_rank(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value, one that JSON can hold, on every rank; ignore the other ranks' values."""
    first = dist.get_rank() == 0
    content = _packed(value if first else None)
    size = torch.tensor([len(content)])
    with meeting_peers():
        dist.broadcast(size, src=0, group=group)
        content = content if first else content.new_zeros(int(size))
        dist.broadcast(content, src=0, group=group)
    return _unpacked(content)


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(content: torch.Tensor) -> Any:
    """Return the value that another rank has packed; raise RunError if the content is not JSON."""
    try:
        return json.loads(content.numpy().tobytes())
    except ValueError as error:
        raise RunError(f"rank {dist.get_rank()} was sent what no rank sends: {error}") from None


@dataclass(frozen=True, slots=True)
class Vote:
    """The ranks' joint state at the beginning of a step, the same on every rank.

    Attributes:
        stop: the signal that some rank had received, or None.
        failed: True if some rank's background work had failed.
        joins: True if new processes are to join after the step.
    """

    stop: signal.Signals | None
    failed: bool
    joins: bool = False


class StopSignals:
    """The stop signals that this process has received.

    Attributes:
        received: the place of the latest in `STOP_SIGNALS`, counted from 1; 0: none.
    """

    def __init__(self) -> None:
        self.received = 0

    def handle(self) -> dict[signal.Signals, Any]:
        """Note signals from now on; return the former handlers."""
        return {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = max(self.received, 1 + STOP_SIGNALS.index(signal.Signals(number)))


class StopRequest:
    """SIGTERM and SIGINT as a request to stop after the step under way, agreed on by all ranks.

    Ranks of a pipeline are at different points when a signal reaches them. Each rank posts its vote when a
    step begins and reads the joint vote when the step has ended. So all ranks stop after the same step.
    A failure in one rank's background work reaches all ranks in the same way.
    No step ends before every rank has begun it, so the vote adds no wait.

    Every rank makes one at the same point. As a context manager it handles the signals; its exit restores the
    former handlers and frees its process `group`.

    Args:
        signals: those that were noted before; None: none were.
    """

    def __init__(self, signals: StopSignals | None = None) -> None:
        self._signals = signals or StopSignals()
        self.group = dist.new_group(backend="gloo", group_desc="weft stop votes")
        # A rank without steps would leave, and close connections that a slower one still makes.
        with meeting_peers():
            dist.barrier(group=self.group)

    def __enter__(self) -> StopRequest:
        self._former = self._signals.handle()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        dist.destroy_process_group(self.group)

    def post_vote(self, *, failed: bool = False, joins: bool = False) -> None:
        """Send this rank's vote at the beginning of a step.

        Args:
            failed: its background work has failed.
            joins: it knows of new processes that wait to join after the step.
        """
        self._vote = torch.tensor([self._signals.received, int(failed), int(joins)], dtype=torch.int32)
        with meeting_peers():
            self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def read_vote(self) -> Vote:
        """Wait for the joint vote of the step that ends and return it."""
        with meeting_peers():
            self._work.wait()
        place, failed, joins = self._vote.tolist()
        return Vote(STOP_SIGNALS[place - 1] if place else None, bool(failed), bool(joins))
