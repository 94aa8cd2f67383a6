"""`Factor`: the curvature of one side of linear layers, and its damped inverse, from step to step.

The factors are `A = sum a^T a / T` and `B = sum e^T e / T`, over the T tokens of a step. Rows a are inputs of
y = W x + b, and rows e gradients of its outputs. A row e is of its token's loss: T times that of the mean.
With `pi = sqrt((tr A / n_a) / (tr B / n_b))` the inverses are those of `A + sqrt(damping) pi I` and
`B + sqrt(damping) / pi I` (Martens and Grosse, arXiv 1503.05671, section 6.3).
"""

from __future__ import annotations

import torch

# The least that is added to a factor.
_LEAST = 1e-7
# A factor that rounding has made indefinite is damped more, as often as this.
_TRIES, _MORE = 5, 10.0


class Factor:
    """The sum of a window, and the inverses of complete ones.

    The tensors live as long as the factor, so that checkpoints keep them.

    Attributes:
        sum: (n, n), symmetric.
        next, inverse: (n, n), of the last complete sum, and what steps use until all of a block are there.
        mean: the mean of the diagonal of the last complete sum, (); negative before there is one.
        begun: 1 if rows have been added since the last inverse, ().
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sum = torch.zeros(size, size, dtype=dtype, device=device)
        self.next, self.inverse = (torch.eye(size, dtype=dtype, device=device) for _ in range(2))
        self.mean = torch.full((), -1.0, dtype=dtype, device=device)
        self.begun = torch.zeros((), dtype=torch.int64)

    def add(self, rows: torch.Tensor, scale: float) -> None:
        """Add `scale` times the products of rows, (tokens, n), with each other."""
        rows = rows.flatten(0, -2).to(self.sum.dtype)
        self.sum.addmm_(rows.T, rows, alpha=scale)
        self.begun.fill_(1)

    def complete(self) -> None:
        """Take the mean of the diagonal, now that all rows of all ranks are in the sum."""
        mean = self.sum.diagonal().mean()
        self.mean.copy_(torch.where(mean > 0, mean, self.mean))

    def invert(self, damping: float, other: torch.Tensor) -> bool:
        """Invert the damped sum, and begin the next one; return False if nothing was added to it.

        A sum of zeros keeps the inverse before it. `other` is the mean of the factors of the other side. A
        mean is of the last complete sum, if there is one yet.
        """
        if not self.begun:
            return False
        if self.sum.any():
            known = bool(self.mean > 0) and bool(other > 0)
            ratio = float((self.mean / other).sqrt()) if known else 1.0
            self.next.copy_(damped_inverse(self.sum, max(damping**0.5 * ratio, _LEAST)))
        self.sum.zero_()
        self.begun.zero_()
        return True

    def forget(self) -> None:
        """Begin the sum and the next inverse anew."""
        self.sum.zero_()
        self.begun.zero_()
        self.next.copy_(self.inverse)


def damped_inverse(matrix: torch.Tensor, added: float) -> torch.Tensor:
    """Return the inverse of a symmetric matrix plus `added` on its diagonal, by Cholesky.

    Raises:
        FloatingPointError: if the matrix is not finite.
    """
    for number in range(_TRIES):
        damped = matrix.double() if number else matrix.clone()
        damped.diagonal().add_(added * _MORE**number)
        root, failed = torch.linalg.cholesky_ex(damped)
        # What is not finite shows on the diagonal, which is quicker to read than the matrix.
        if not failed.item() and torch.isfinite(root.diagonal()).all():
            return torch.cholesky_inverse(root).to(matrix.dtype)
        if not torch.isfinite(matrix).all():
            raise FloatingPointError("a factor of K-FAC is not finite")
    raise FloatingPointError(
        f"a factor of K-FAC stays indefinite with {added * _MORE ** (_TRIES - 1):g} added"
    )
