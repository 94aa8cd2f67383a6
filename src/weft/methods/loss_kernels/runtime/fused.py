"""`FusedLogits`: the fused linear cross entropy of Liger Kernel (Hsu et al., arXiv 2410.10989)."""

from __future__ import annotations

import torch

from weft.run.parallel.divided_logits import IGNORED
from weft.run.parallel.unmade_logits import UnmadeLogits


class FusedLogits(UnmadeLogits):
    """Logits that a kernel for GPUs makes and uses in place; only a loss reads them."""

    def total_cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the sum over the targets (...) that are not `ignored`."""
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        total: torch.Tensor = liger_fused_linear_cross_entropy(
            self.hidden.flatten(0, -2),
            self.weight,
            targets.flatten(),
            bias=self.bias,
            ignore_index=ignored,
            reduction="sum",
            accum_dtype=torch.float32,
        )
        return total

    def argmax(self) -> torch.Tensor:
        """Return the class of the largest logit, shape (...), from all logits at once."""
        classes: torch.Tensor = torch.nn.functional.linear(self.hidden, self.weight, self.bias).argmax(-1)
        return classes
