"""`ReplicaRanks`: several ranks that hold one replica of a stage together, and their exchange of tensors.

Repetitions of a sum have the same bits, and replicated values stay equal. Through host memory, sums are in
the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from weft.run.launch.failures import PeerLostError
from weft.run.work_queue import first_line
from weft.sync.base import Group


class ReplicaRanks:
    """The ranks of one replica of a stage, seen from one of them.

    Args:
        place, size: this rank's place among `size` ranks.
    """

    # The ranks' kind in error messages.
    name: ClassVar[str]

    def __init__(self, place: int = 0, size: int = 1) -> None:
        self.place = place
        self.size = size
        self._group: Group | None = None

    def share(self, length: int, place: int | None = None) -> range:
        """Return a rank's part of `length`, by default this rank's; parts differ by at most one."""
        place = self.place if place is None else place
        return range(length * place // self.size, length * (place + 1) // self.size)

    def connect(self, group: Group) -> None:
        """Exchange over this group from now on; its ranks are in the order of their places."""
        self._group = group

    def disconnect(self) -> None:
        self._group = None

    @property
    def group(self) -> Group:
        assert self._group is not None, "a runtime connects the stages that it is given"
        return self._group

    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' values of one shape, in the ranks' order, as a new tensor."""
        flat = value.detach().contiguous().view(-1)
        total = flat.new_zeros(-(-len(flat) // self.size) * self.size)
        total[: len(flat)] = flat
        with self.meeting():
            self.group.add_up(total)
        return total[: len(flat)].view(value.shape)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return all ranks' values of one shape, in the order of the ranks: (size, ...)."""
        share = value.detach().contiguous()
        found = share.new_empty((self.size, *share.shape))
        with self.meeting():
            self.group.all_gather(found.view(-1), share.view(-1))
        return found

    def scatter_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the own part (...) of the sum of all ranks' values (size, ...), in the ranks' order."""
        shares = values.detach().contiguous()
        with self.meeting():
            own = self.group.reduce_scatter(shares.view(-1))
        return own.view(shares.shape[1:])

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Run an exchange; raise PeerLostError for torch's errors, which mean that another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLostError(f"lost another {self.name} rank: {first_line(error)}") from error
