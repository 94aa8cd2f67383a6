"""`VotedOptimizer`: an optimizer that leaves a step out if a tensor says so, which the host does not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# `torch.amp.GradScaler` and torch's fused optimizers use the same attribute.
_VOTE = "found_inf"


class VotedOptimizer(torch.optim.Optimizer):
    """A step that `left_out` forbids changes neither parameters nor states."""

    @property
    def left_out(self) -> torch.Tensor | None:
        """A tensor of shape (): 1 to leave the step out, else 0; None steps."""
        vote: torch.Tensor | None = getattr(self, _VOTE, None)
        return vote


@contextmanager
def leaving_out(optimizer: torch.optim.Optimizer, votes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Enter a block where the optimizer leaves its step out if a vote is 1; the host reads none."""
    if not votes:
        yield
        return
    setattr(optimizer, _VOTE, torch.stack(tuple(votes)).amax())
    try:
        yield
    finally:
        delattr(optimizer, _VOTE)
