"""`ClippedSum`: the sum of clipped gradients, in one pass also for the least norm of a step.

Under `min`, every gradient is added with norm 1, and the sum is scaled once, by the least norm (Wang, arXiv
2408.16204, algorithm 1). It is the mean of all gradients scaled to the least norm. Each
source of the data may have a bound of its own, and then a sum of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.methods.micro_batch_clipping.options import ClipTable
from weft.methods.micro_batch_clipping.report import BOUND, BOUNDS, CLIPPED, DROPPED, NORMS


class ClippedSum:
    """The sum over a rank's clipped micro-batches.

    Args:
        groups: clipped micro-batches of the global batch.
        like: the gradients of the rank's stages, each (n,).

    Attributes:
        bounds: the norms that bound gradients, (sources,), in fp64; of `quantile`, those of the step before.
    """

    def __init__(self, table: ClipTable, groups: int, like: Sequence[torch.Tensor]) -> None:
        self._table, self._groups = table, groups
        self._totals = [[torch.zeros_like(one) for one in like] for _ in range(table.sources)]
        start = torch.inf if table.bound is None else table.bound
        self.bounds = torch.full((table.sources,), start, dtype=torch.float64, device=like[0].device)

    def add(
        self,
        gradients: Sequence[torch.Tensor],
        squares: torch.Tensor,
        loss_factor: float | torch.Tensor = 1.0,
        source: int = 0,
    ) -> torch.Tensor:
        """Add the gradients of one micro-batch, and return the norm of its mean gradient, ().

        Args:
            gradients: those of the rank's stages, each (n,), which may be overwritten.
            squares: the sum of squares of the whole gradient, of all ranks of the replica, ().
            loss_factor: the factor of all losses.
        """
        # Losses have their weight in the step, one over the number of micro-batches.
        norm = squares.sqrt() * (self._groups / loss_factor)
        finite = norm.isfinite()
        if self._table.micro != "min":
            factor = (self.bounds[source] / norm).clamp(max=1.0)
        elif self._groups == 1:
            factor = torch.ones_like(norm)
        else:
            factor = torch.where(norm > self._table.floor, 1.0 / norm, 0.0)
        factor = torch.where(finite, factor, 0.0)
        for total, gradient in zip(self._totals[source], gradients, strict=True):
            total.addcmul_(_kept(gradient, finite), factor.to(gradient.dtype))
        return norm

    def finish(
        self, norms: torch.Tensor, sources: torch.Tensor, results: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Put the gradients of the step into `results`, and return the step's numbers; begin a new sum.

        Args:
            norms: of all clipped micro-batches of the global batch, (groups,), in fp64.
            sources: those of the micro-batches, (groups,).
            results: the gradients of the rank's stages, each (n,).
        """
        finite = norms.isfinite()
        # Others take over the weight of those that are left out.
        weight = self._groups / finite.sum().clamp(min=1).double()
        factors, bounds = weight.expand(len(self.bounds)), self.bounds.clone()
        if self._table.micro == "min":
            counted = torch.where(finite & (norms > self._table.floor), norms, torch.inf)
            bounds = torch.full_like(bounds, torch.inf).scatter_reduce(0, sources, counted, "amin")
            bounds = torch.where(bounds.isfinite(), bounds, 0.0)
            factors = factors if self._groups == 1 else factors * bounds
        elif self._table.quantile is not None:
            # The first step has no bound: its largest norm is told.
            largest = torch.zeros_like(bounds).scatter_reduce(0, sources, norms.nan_to_num(0, 0, 0), "amax")
            bounds = torch.where(bounds.isfinite(), bounds, largest)
            self._next_bounds(torch.where(finite, norms, torch.inf), sources, self._table.quantile)
        for result, totals in zip(results, zip(*self._totals, strict=True), strict=True):
            first, *others = factors.to(result.dtype)
            torch.mul(totals[0], first, out=result)
            for total, factor in zip(totals[1:], others, strict=True):
                result.addcmul_(total, factor)
            for total in totals:
                total.zero_()
        each = bounds[sources]
        return {
            NORMS: norms,
            BOUNDS: each,
            BOUND: each.mean(),
            CLIPPED: (finite & (norms > each)).double().mean(),
            DROPPED: finite.logical_not().double().mean(),
        }

    def _next_bounds(self, norms: torch.Tensor, sources: torch.Tensor, quantile: float) -> None:
        """Take the quantiles of this step's finite norms as the bounds of the next one."""
        for source, bound in enumerate(self.bounds):
            known = torch.where(sources == source, norms, torch.inf).sort().values
            count = known.isfinite().sum()
            place = ((count - 1).clamp(min=0) * quantile).round().long()
            bound.copy_(torch.where(count > 0, known[place], bound))


def _kept(gradient: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Return the gradient, or zeros if its norm is not finite: times zero, it would not be finite either.

    The host of an accelerator does not wait for the norm. A CPU saves a pass over the gradient.
    """
    if finite.device.type == "cpu":
        return gradient if finite.item() else torch.zeros_like(gradient)
    return gradient.masked_fill_(~finite, 0.0)
