"""What the runtime asks of a method that makes replicas agree."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Synchroniser(Protocol):
    """One method. The runtime gives it a thread of its own, so it may block.

    A gradient is the flat one of a stage, or a share of it: shape (n,), contiguous, in host memory; n is a
    multiple of the group's size.
    """

    def reduce(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make `gradient` the one to step with on every rank of `group`."""
        ...

    def reduce_scatter(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The rank's own share, shape (n / size,), of the gradient to step with; `gradient` stays as it is.

        The r-th rank of the group gets the r-th share.
        """
        ...
