"""Statistics that a stage collects in training, such as those of batch norms, the same in every layout.

Every replica moves its own towards the means of its own micro-batches, once per step. This move is linear. So
one process would have the replicas' mean, weighted by their shares of the micro-batches. An evaluation or a
checkpoint takes this mean, and later steps do not change by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from weft.sync.base import Group


@runtime_checkable
class Counting(Protocol):
    """A part of a stage that has statistics."""

    def count(self) -> None:
        """Count the last forward pass for the step; a rerun of a pass does not count."""
        ...

    def end_step(self, left_out: torch.Tensor | None = None) -> None:
        """Move the statistics towards the mean of the counted passes, unless `left_out`, shape (), is 1."""
        ...

    def statistics(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors to average over replicas, to be changed in place."""
        ...


class StageStatistics:
    """The statistics of one replica of a stage.

    Args:
        module: the stage.
        share: this replica's share of a step's micro-batches.
        groups: the groups over which the stage's replicas add up, in turn: all replicas; or those that shard
            it, then those with the same shard. Empty with a single replica.
    """

    def __init__(self, module: nn.Module, share: float, groups: Sequence[Group]) -> None:
        self._parts = [part for part in module.modules() if isinstance(part, Counting)]
        self._share = share
        self._groups = tuple(groups)

    @property
    def collects(self) -> bool:
        """True if the stage has any."""
        return bool(self._parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The statistics, which may be changed in place."""
        return [value for part in self._parts for value in part.statistics()]

    def count(self) -> None:
        for part in self._parts:
            part.count()

    def end_step(self, left_out: torch.Tensor | None = None) -> None:
        for part in self._parts:
            part.end_step(left_out)

    def average(self) -> None:
        """Give all replicas the weighted mean of their statistics; every rank of the groups calls it."""
        if not self._groups or not self._parts:
            return
        values = self.tensors
        mean = torch.cat([value.double().flatten() for value in values]) * self._share
        for group in self._groups:
            group.all_reduce(mean)
        for value, part in zip(values, mean.split([value.numel() for value in values]), strict=True):
            value.copy_(part.view_as(value))


def average_statistics(statistics: Mapping[int, StageStatistics]) -> None:
    """Average the statistics of a rank's stages; every rank of the job calls it, between two steps."""
    for stage in sorted(statistics):
        statistics[stage].average()
