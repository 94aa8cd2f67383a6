"""`VotedOptimizer`: an optimizer that leaves a step out if a tensor says so, which the host does not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# `torch.amp.GradScaler` and torch's fused optimizers use the same attribute.
_VOTE = "found_inf"
_FUSED: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_MOMENTUM = "momentum_buffer"


class VotedOptimizer(torch.optim.Optimizer):
    """A step that `left_out` forbids changes neither parameters nor states."""

    @property
    def left_out(self) -> torch.Tensor | None:
        """A tensor of shape (): 1 to leave the step out, else 0; None steps."""
        vote: torch.Tensor | None = getattr(self, _VOTE, None)
        return vote


def leaves_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer leaves a step out when a tensor says so.

    Fused kernels of Adam, AdamW and SGD do. A first momentum of SGD is its gradient, which equals a step from
    a momentum of zero only without dampening.
    """
    if isinstance(optimizer, VotedOptimizer):
        return True
    groups = optimizer.param_groups
    return type(optimizer) in _FUSED and all(
        group["fused"] and not group.get("dampening", 0.0) for group in groups
    )


def decided(votes: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a tensor of shape (): 1 if a vote is 1, to leave a step out, else 0; None without votes."""
    return torch.stack(tuple(votes)).amax() if votes else None


@contextmanager
def leaving_out(optimizer: torch.optim.Optimizer, left_out: torch.Tensor | None) -> Iterator[None]:
    """Let the optimizer leave its step out in this block if the tensor is 1, unread by the host."""
    if left_out is None:
        yield
        return
    fresh = list(_without_momentum(optimizer))
    setattr(optimizer, _VOTE, left_out)
    try:
        yield
    finally:
        delattr(optimizer, _VOTE)
    for parameter in fresh:
        momentum = optimizer.state.get(parameter, {}).get(_MOMENTUM)
        if momentum is not None:
            # The kernel makes it and, if it leaves the step out, writes nothing there.
            momentum.masked_fill_(left_out > 0, 0.0)


def _without_momentum(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            yield from (one for one in group["params"] if optimizer.state.get(one, {}).get(_MOMENTUM) is None)
