"""A group of ranks that notes when its calls began and ended, and what left for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from weft.sync.base import Group

# What expert ranks call: rows of tokens, counts of rows and the loss, and gradients.
ROWS, SMALL, GRADIENTS = "all_to_all_rows", "all_gather", "add_up"


class Call(NamedTuple):
    """One call of a group by one rank: monotonic seconds, and bytes for other ranks if they are rows."""

    name: str
    begin_s: float
    end_s: float
    leaving_bytes: float


class WatchedGroup:
    """All of a `weft.sync.base.Group`; `calls` has those of `ROWS`, `SMALL` and `GRADIENTS` in order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        return self._noting(name, found) if name in (ROWS, SMALL, GRADIENTS) else found

    def _noting(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*given: Any) -> object:
            begin_s = time.monotonic()
            answer = call(*given)
            leaving = self._leaving_bytes(*given) if name == ROWS else 0.0
            self.calls.append(Call(name, begin_s, time.monotonic(), leaving))
            return answer

        return noted

    def _leaving_bytes(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: Sequence[int], given_rows: Sequence[int]
    ) -> float:
        rows = sum(given_rows) - given_rows[self._group.place]
        return float(rows * given.itemsize * given[0].numel()) if rows else 0.0

    def as_group(self) -> Group:
        """The same, for callers that ask for a group."""
        return cast("Group", self)


class Together(NamedTuple):
    """A call as all ranks see it: seconds from the last one's begin to the last one's end, and most bytes."""

    name: str
    seconds: float
    leaving_bytes: float


def together(calls: Sequence[Call]) -> list[Together]:
    """The calls of all ranks of the job; each of them calls it, with as many calls in the same order."""
    rows = torch.from_numpy(np.array([call[1:] for call in calls], dtype=np.float64).reshape(-1, 3))
    dist.all_reduce(rows, dist.ReduceOp.MAX)
    return [
        Together(call.name, end_s - begin_s, leaving)
        for call, (begin_s, end_s, leaving) in zip(calls, rows.tolist(), strict=True)
    ]
