"""A group of threads that exchange tensors in one process, and count the bytes that leave each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

LIMIT_S = 30.0


class ThreadGroup:
    """One thread's place in a group: what a `weft.sync.base.Group` needs for sums and averagings."""

    def __init__(
        self,
        barrier: threading.Barrier,
        given: list[torch.Tensor],
        rows: list[list[torch.Tensor]],
        place: int,
    ) -> None:
        self._barrier, self._given, self._rows = barrier, given, rows
        self.size, self.place = barrier.parties, place
        self.sent_bytes: dict[str, int] = {"all_gather": 0, "all_to_all": 0}

    def leave(self) -> None:
        """Let all others fail that wait for this one."""
        self._barrier.abort()

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        self.sent_bytes["all_gather"] += (self.size - 1) * share.nbytes
        self._exchange(flat, share, lambda one: one)

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        self.sent_bytes["all_to_all"] += given.nbytes * (self.size - 1) // self.size
        self._exchange(taken, given, lambda one: one.view(self.size, -1)[self.place])

    def all_to_all_rows(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: Sequence[int], given_rows: Sequence[int]
    ) -> None:
        parts = list(given.split(list(given_rows)))
        sent = sum(one.nbytes for place, one in enumerate(parts) if place != self.place)
        self.sent_bytes["rows"] = self.sent_bytes.get("rows", 0) + sent
        self._rows[self.place] = parts
        self._barrier.wait(LIMIT_S)
        found = [one[self.place] for one in self._rows]
        self._barrier.wait(LIMIT_S)
        assert [len(one) for one in found] == list(taken_rows)
        taken.copy_(torch.cat(found))

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        whole = flat.clone()
        self.add_up(whole)
        return whole.view(self.size, -1)[self.place].clone()

    def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        each = torch.empty(self.size, len(flat), dtype=flat.dtype)
        self._exchange(each.view(-1), flat, lambda one: one)
        flat.copy_(sum(each))

    def _exchange(
        self, taken: torch.Tensor, given: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._given[self.place] = given
        self._barrier.wait(LIMIT_S)
        found = torch.cat([own(one) for one in self._given])
        self._barrier.wait(LIMIT_S)
        taken.copy_(found)


def group_of(size: int) -> list[ThreadGroup]:
    """A group of so many threads, by their places."""
    barrier, given, rows = threading.Barrier(size), [torch.empty(0)] * size, [[]] * size
    return [ThreadGroup(barrier, given, rows, place) for place in range(size)]


def in_groups(size: int, work: Callable[[ThreadGroup], Any]) -> Sequence[Any]:
    """Return what `work` returns in each of so many threads, in the order of their places.

    Where one fails, the others do not wait for it.
    """

    def guarded(group: ThreadGroup) -> Any:
        try:
            return work(group)
        except BaseException:
            group.leave()
            raise

    return in_threads(guarded, group_of(size))


def in_threads(work: Callable[[Any], Any], given: Sequence[Any]) -> Sequence[Any]:
    """Return what `work` returns for each of `given`, all at once."""
    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(work, given))
