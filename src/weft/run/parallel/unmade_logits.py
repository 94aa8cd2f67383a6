"""`UnmadeLogits`: a last stage's output from which a loss kernel computes the loss, without all logits.

The output is the input of the product with the vocabulary. A kernel takes it with the product's weights, and
makes the logits itself, a part of them at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from weft.run.parallel.divided_logits import IGNORED
from weft.run.parallel.tensor_parallel import TensorRanks


@dataclass(frozen=True, slots=True)
class UnmadeLogits(ABC):
    """Logits (..., vocabulary) that no tensor holds.

    Attributes:
        hidden: vectors (..., width), equal on all tensor ranks.
        weight: the matrix (columns, width) of this rank's share of the vocabulary.
        bias: its bias (columns,), if it has any.
    """

    # The attribute of a loss function that takes them.
    declared: ClassVar[str] = "takes_unmade_logits"

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    vocabulary: int
    ranks: TensorRanks

    def cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the mean over the targets (...) that are not `ignored`; the same number on all ranks."""
        return self.total_cross_entropy(targets, ignored) / (targets != ignored).sum()

    @abstractmethod
    def total_cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the sum over the targets (...) that are not `ignored`; the same number on all ranks."""

    @abstractmethod
    def argmax(self) -> torch.Tensor:
        """Return the class of the largest logit, shape (...)."""

    def detach(self) -> Self:
        """Return the logits cut from the autograd graph."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)


# From vectors, weight, bias, vocabulary and ranks to the logits of a kernel.
LossKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, TensorRanks], UnmadeLogits]
