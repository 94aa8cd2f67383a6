"""The tensors of Liger Kernel's fused linear cross entropy on a GPU, without its kernels.

Hsu et al., arXiv 2410.10989, section 3.2, as version 0.8.5 allocates on devices that add up products in fp32
in place (compute capability 8 and later). Nothing is computed, so that fake tensors on a CPU can show the
memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

MODULE = "liger_kernel.transformers.functional"


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Vectors (n, width) and a matrix (classes, width) to a loss (); both gradients stay until backward."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        (tokens, width), classes = vectors.shape, len(matrix)
        chunk = min(tokens, _power_of_two(-(-tokens // -(-classes // width))))
        vector_gradient = torch.zeros_like(vectors)
        matrix_gradient = torch.zeros_like(matrix, dtype=torch.float32)
        losses = torch.zeros(tokens, dtype=torch.float32)
        # All chunks in turn are in this room, and then their gradients.
        logits = vectors.new_empty(chunk, classes)
        if matrix.dtype == torch.float32:
            matrix_gradient += torch.mm(logits.t(), vectors[:chunk])
        del logits
        ctx.save_for_backward(vector_gradient, matrix_gradient.to(matrix.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients, which a kernel multiplies in place."""
        found: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return found


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _fused(
    vectors: torch.Tensor, matrix: torch.Tensor, targets: torch.Tensor, **options: Any
) -> torch.Tensor:
    loss: torch.Tensor = _FusedLinearCrossEntropy.apply(vectors, matrix)  # type: ignore[no-untyped-call]
    return loss


@contextmanager
def installed() -> Iterator[None]:
    """Let these tensors take the place of the package."""
    package = ModuleType(MODULE)
    package.liger_fused_linear_cross_entropy = _fused  # type: ignore[attr-defined]
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = package
    try:
        yield
    finally:
        del sys.modules[MODULE]
        if before is not None:
            sys.modules[MODULE] = before
