"""`Factor`: the curvature of one side of linear layers, and what multiplies gradients, from step to step.

The factors are `A = sum a^T a / T` and `B = sum e^T e / T`, over the T tokens of a step. Rows a are inputs of
y = W x + b, and rows e gradients of its outputs. A row e is of its token's loss: T times that of the mean.
Gradients are multiplied in one of two forms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch

from weft.methods.kfac.options import FormName
from weft.methods.kfac.runtime.linear_parts import WHOLE, WholeLinear

# The least that is added to a factor.
_LEAST = 1e-7
# A factor that rounding has made indefinite is damped more, as often as this.
_TRIES, _MORE = 5, 10.0


class Factor(ABC):
    """The sum of a window, and the results of complete ones.

    The tensors live as long as the factor, so that checkpoints keep them.

    Attributes:
        names: of the tensors of a result.
        sum: (n, n), symmetric.
        next, used: the result of the last complete sum, and what steps use until all of a block are there.
        mean: the mean of the diagonal of the last complete sum, (); negative before there is one.
        begun: 1 if rows have been added since the last result, ().
    """

    names: ClassVar[tuple[str, ...]]

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sum = torch.zeros(size, size, dtype=dtype, device=device)
        self.next, self.used = (tuple(self._of_identity()) for _ in range(2))
        self.mean = torch.full((), -1.0, dtype=dtype, device=device)
        self.begun = torch.zeros((), dtype=torch.int64)

    @abstractmethod
    def _of_identity(self) -> Sequence[torch.Tensor]:
        """Return the result for the identity."""

    @abstractmethod
    def _solved(self, damping: float, other: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the result for the sum; see `invert`."""

    @staticmethod
    @abstractmethod
    def multiplied(
        gradient: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        damping: float,
        linear: WholeLinear = WHOLE,
    ) -> torch.Tensor:
        """Return the gradient of a weight, (columns, inner), times the results of both sides.

        The gradient of a bias, (columns,), has no result of inputs. Ranks that divide the linear layer call
        it together, each with its part of the gradient.
        """

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
        """Make the result of the sum, and begin the next one; return False if nothing was added to it.

        A sum of zeros keeps the result before it. `other` is the mean of the factors of the other side. A
        mean is of the last complete sum, if there is one yet.

        Raises:
            FloatingPointError: if the sum is not finite, or has no result.
        """
        if not self.begun:
            return False
        if self.sum.any():
            _copy(self.next, self._solved(damping, other))
        self.sum.zero_()
        self.begun.zero_()
        return True

    def take(self) -> None:
        """Let steps use the next result."""
        _copy(self.used, self.next)

    def forget(self) -> None:
        """Begin the sum and the next result anew."""
        self.sum.zero_()
        self.begun.zero_()
        _copy(self.next, self.used)


class DampedInverse(Factor):
    """The inverses of `A + sqrt(damping) pi I` and `B + sqrt(damping) / pi I`.

    With `pi = sqrt((tr A / n_a) / (tr B / n_b))` (Martens and Grosse, arXiv 1503.05671, section 6.3).
    """

    names = ("inverse",)

    def _of_identity(self) -> Sequence[torch.Tensor]:
        return (self.sum.new_zeros(self.sum.shape).fill_diagonal_(1.0),)

    def _solved(self, damping: float, other: torch.Tensor) -> Sequence[torch.Tensor]:
        known = bool(self.mean > 0) and bool(other > 0)
        ratio = float((self.mean / other).sqrt()) if known else 1.0
        return (damped_inverse(self.sum, max(damping**0.5 * ratio, _LEAST)),)

    @staticmethod
    def multiplied(
        gradient: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        damping: float,
        linear: WholeLinear = WHOLE,
    ) -> torch.Tensor:
        left = linear.times_outputs(outputs[0], gradient)
        return linear.times_inputs(left, inputs[0]) if inputs else left


class Eigenvectors(Factor):
    """The inverse of `B x A + damping I`, from the eigenvectors of A and of B.

    That of a bias is of `B + damping I` (Martens and Grosse, arXiv 1503.05671, section 4.2 and appendix B).
    """

    names = ("vectors", "values")

    def _of_identity(self) -> Sequence[torch.Tensor]:
        return self.sum.new_zeros(self.sum.shape).fill_diagonal_(1.0), self.sum.new_ones(len(self.sum))

    def _solved(self, damping: float, other: torch.Tensor) -> Sequence[torch.Tensor]:
        if not torch.isfinite(self.sum).all():
            raise FloatingPointError("a factor of K-FAC is not finite")
        values, vectors = torch.linalg.eigh(self.sum)
        return vectors, values.clamp(min=0.0)

    @staticmethod
    def multiplied(
        gradient: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        damping: float,
        linear: WholeLinear = WHOLE,
    ) -> torch.Tensor:
        outer, values = outputs
        turned, of_outer = linear.times_outputs(outer.mT, gradient), linear.of_outputs(values)
        if not inputs:
            return linear.times_outputs(outer, turned / (of_outer + damping))
        inner, values = inputs
        turned, of_inner = linear.times_inputs(turned, inner), linear.of_inputs(values)
        left = linear.times_outputs(outer, turned / (torch.outer(of_outer, of_inner) + damping))
        return linear.times_inputs(left, inner.mT)


FORMS: Mapping[FormName, type[Factor]] = MappingProxyType({"inverse": DampedInverse, "eigen": Eigenvectors})


def _copy(kept: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    for one, other in zip(kept, new, strict=True):
        one.copy_(other)


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
