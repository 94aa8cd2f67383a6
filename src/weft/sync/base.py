"""What the runtime asks of a method that makes replicas agree."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Synchroniser(Protocol):
    """One method. The runtime gives it a thread of its own, so it may block."""

    def reduce(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make `gradient`, the flat gradient of a stage, the one to step with on every rank of `group`.

        `gradient` has shape (n,), is contiguous and lies in host memory; n is a multiple of the group's size.
        """
        ...
