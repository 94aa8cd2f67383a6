"""`ClippedSum`: the sum of clipped gradients, in one pass also for the least norm of a step.

Under `min`, every gradient is added with norm 1, and the sum is scaled once, by the least norm (Wang, arXiv
2408.16204, algorithm 1). It is the mean of all gradients scaled to the least norm.
"""

from __future__ import annotations

import torch

from weft.methods.micro_batch_clipping.options import ClipTable
from weft.methods.micro_batch_clipping.report import BOUND, CLIPPED, DROPPED, NORMS


class ClippedSum:
    """The sum over a rank's clipped micro-batches.

    Args:
        groups: clipped micro-batches of the global batch.
        like: the rank's gradient, (n,).

    Attributes:
        bound: the norm that bounds gradients, (), in fp64; of `quantile`, that of the step before.
    """

    def __init__(self, table: ClipTable, groups: int, like: torch.Tensor) -> None:
        self._table, self._groups = table, groups
        self._total = torch.zeros_like(like)
        start = torch.inf if table.bound is None else table.bound
        self.bound = torch.full((), start, dtype=torch.float64, device=like.device)

    def add(self, gradient: torch.Tensor, squares: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """Add a gradient (n,), which may be overwritten, and return the norm of the mean gradient, ().

        Args:
            squares: the sum of squares of the whole gradient, of all ranks of the replica, ().
            loss_factor: the factor of all losses.
        """
        # Losses have their weight in the step, one over the number of micro-batches.
        norm = squares.sqrt() * (self._groups / loss_factor)
        finite = norm.isfinite()
        if self._table.micro != "min":
            factor = (self.bound / norm).clamp(max=1.0)
        elif self._groups == 1:
            factor = torch.ones_like(norm)
        else:
            factor = torch.where(norm > self._table.floor, 1.0 / norm, 0.0)
        self._total.addcmul_(_kept(gradient, finite), torch.where(finite, factor, 0.0).to(gradient.dtype))
        return norm

    def finish(self, norms: torch.Tensor, result: torch.Tensor) -> dict[str, torch.Tensor]:
        """Put the gradient of the step into `result` (n,), and return the step's numbers; begin a new sum.

        Args:
            norms: of all clipped micro-batches of the global batch, (groups,), in fp64.
        """
        finite = norms.isfinite()
        # Others take over the weight of those that are left out.
        factor, bound = self._groups / finite.sum().clamp(min=1).double(), self.bound.clone()
        if self._table.micro == "min":
            counted = finite & (norms > self._table.floor)
            bound = torch.where(counted, norms, torch.inf).amin()
            bound = torch.where(bound.isfinite(), bound, 0.0)
            factor = factor if self._groups == 1 else factor * bound
        elif self._table.quantile is not None:
            known = torch.where(finite, norms, torch.inf).sort().values
            # The first step has no bound: its largest norm is told.
            bound = torch.where(bound.isfinite(), bound, torch.where(finite, norms, 0.0).amax())
            place = ((finite.sum() - 1).clamp(min=0) * self._table.quantile).round().long()
            self.bound.copy_(torch.where(finite.any(), known[place], self.bound))
        torch.mul(self._total, factor.to(result.dtype), out=result)
        self._total.zero_()
        return {
            NORMS: norms,
            BOUND: bound,
            CLIPPED: (finite & (norms > bound)).double().mean(),
            DROPPED: finite.logical_not().double().mean(),
        }


def _kept(gradient: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Return the gradient, or zeros if its norm is not finite: times zero, it would not be finite either.

    The host of an accelerator does not wait for the norm. A CPU saves a pass over the gradient.
    """
    if finite.device.type == "cpu":
        return gradient if finite.item() else torch.zeros_like(gradient)
    return gradient.masked_fill_(~finite, 0.0)
