"""`LossScale`: the factor of all losses in fp16, so that small gradients do not become zero.

The factor grows while gradients are finite. A step whose gradient overflows is left out, and the factor falls
(Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2). The numbers are those of
torch's `GradScaler`. All are powers of two, so scaling changes no bit of a gradient that does not overflow.
"""

from __future__ import annotations

import torch

INITIAL = 2.0**16
LEAST = 1.0
# Steps with finite gradients until the factor grows.
GROWS_AFTER = 2000


class LossScale:
    """The factor on one rank, which the device computes; all ranks see the same norms and keep the same one.

    Attributes:
        state: the factor and the steps since it changed, shape (2,), in fp64, for checkpoints.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.state = torch.tensor([INITIAL, 0.0], dtype=torch.float64, device=device)

    @property
    def factor(self) -> torch.Tensor:
        """The factor of the next backward passes, shape (): a view of `state`."""
        return self.state[0]

    def after(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the state behind a step whose gradient has this norm, of one element; change nothing."""
        factor, steps = self.state
        finite, steps = norm.squeeze().isfinite(), steps + 1.0
        grows = steps >= GROWS_AFTER
        factor = torch.where(
            finite, torch.where(grows, factor * 2.0, factor), (factor / 2.0).clamp(min=LEAST)
        )
        return torch.stack((factor, torch.where(finite & grows.logical_not(), steps, 0.0)))
