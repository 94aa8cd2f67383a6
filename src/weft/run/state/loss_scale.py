"""`LossScale`: the factor of all losses in fp16, so that small gradients do not become zero.

The factor grows while gradients are finite. A step whose gradient overflows is left out, and the factor falls
(Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2). The numbers are those of
torch's `GradScaler`. All are powers of two, so scaling changes no bit of a gradient that does not overflow.
"""

from __future__ import annotations

import torch

from weft.run.streams import Value

INITIAL = 2.0**16
LEAST = 1.0
# Steps with finite gradients until the factor grows.
GROWS_AFTER = 2000


class LossScale:
    """The factor on one rank; all ranks see the same norms, so they keep the same factor.

    Attributes:
        state: the factor and the steps since it changed, shape (2,), in fp64, for checkpoints.
    """

    def __init__(self) -> None:
        self.state = torch.tensor([INITIAL, 0.0], dtype=torch.float64)
        self._settled: tuple[Value[torch.Tensor] | None, float] = (None, INITIAL)

    @property
    def factor(self) -> float:
        """The factor of the next backward passes."""
        return self.state[0].item()

    def settle(self, norm: Value[torch.Tensor], *, finite: bool) -> float:
        """Return the factor of the step with this norm; the step's first call sets that of the next step."""
        if self._settled[0] is not norm:
            factor, steps = self.state.tolist()
            self._settled = (norm, factor)
            if not finite:
                self.state[:] = torch.tensor([max(LEAST, factor / 2.0), 0.0])
            elif steps + 1 >= GROWS_AFTER:
                self.state[:] = torch.tensor([factor * 2.0, 0.0])
            else:
                self.state[1] += 1.0
        return self._settled[1]
