"""How the ranks of a job agree: one rank's failure is everyone's, and one rank's request is everyone's."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import InputError, RunError, Violation
from weft.run.launch.failures import PeerLostError, disk_problem

# Later signals win when ranks have received different ones: a user's Ctrl-C reaches the ranks as SIGINT and,
# passed on by whoever started them, as SIGTERM too.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def together(
    group: dist.ProcessGroup | None = None, meet: Callable[[], None] | None = None
) -> Iterator[None]:
    """Yield a block that every rank enters and leaves, or none: a refusal or failure on one is raised on all.

    The block must not talk to other ranks, or a failing rank would leave them waiting. A thread of its own
    needs a `group` of its own. Where ranks may be far apart, `meet` waits for them at the end of the block.

    Raises:
        InputError, RunError: the one of the lowest failing rank, on every rank.
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
    for violations, text in gather([[astuple(one) for one in refused], failed], group):
        if violations:
            raise InputError([Violation(*fields) for fields in violations])
        if text:
            raise RunError(text)


@contextmanager
def meeting_peers() -> Iterator[None]:
    """Yield a block of collective calls; torch's errors in it mean that another rank is gone.

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
    """Return every rank's value, in the order of the ranks; small values that JSON knows.

    No pickle, as torch's own would be: who gets between the ranks could have any function called.
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
    """Rank 0's value, one that JSON knows, on every rank; the others' is ignored."""
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
    """What another rank has packed.

    Raises:
        RunError: when it is something else.
    """
    try:
        return json.loads(content.numpy().tobytes())
    except ValueError as error:
        raise RunError(f"rank {dist.get_rank()} was sent what no rank sends: {error}") from None


@dataclass(frozen=True, slots=True)
class Vote:
    """What any rank knew when a step began, the same on every rank.

    Attributes:
        stop: the signal that some rank had received, or None.
        failed: some rank's work in the background had failed.
    """

    stop: signal.Signals | None
    failed: bool


class StopRequest:
    """SIGTERM and SIGINT as a request to stop after the step under way, agreed on by all ranks.

    Ranks of a pipeline are at different points when a signal reaches them. Each rank posts what it knows when
    a step begins and reads what any rank knew when the step has ended, so that all stop after the same step.
    What fails in the background of one rank reaches all ranks in the same way.
    No step ends before every rank has begun it, so the vote costs no further waiting.

    Use it as a context manager: it puts the signals' former handlers back and gives its process group back.
    """

    def __enter__(self) -> StopRequest:
        self._received = 0
        self._group = dist.new_group(backend="gloo", group_desc="weft stop votes")
        self._former = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        dist.destroy_process_group(self._group)

    def post_vote(self, *, failed: bool = False) -> None:
        """Tell the others, at the beginning of a step; `failed`: this rank's work in the background has."""
        self._vote = torch.tensor([self._received, int(failed)], dtype=torch.int32)
        with meeting_peers():
            self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def read_vote(self) -> Vote:
        """What some rank knew when the step began; at the end of the step."""
        with meeting_peers():
            self._work.wait()
        place, failed = self._vote.tolist()
        return Vote(STOP_SIGNALS[place - 1] if place else None, bool(failed))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = max(self._received, 1 + STOP_SIGNALS.index(signal.Signals(number)))
