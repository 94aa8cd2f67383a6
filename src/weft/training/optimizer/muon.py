"""`Muon`: momentum whose matrices are made nearly orthogonal.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks,
kellerjordan.github.io/posts/muon, 2024. All other parameters step by AdamW. A step overwrites gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.adamw import adamw

from weft.describe.optimizers import MUON
from weft.run.state.whole_matrices import WholeMatricesOptimizer

# A quintic whose slope at 0 is large: singular values end in a band around 1, and not at 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The norm of a matrix counts as at least this.
LEAST_NORM = 1e-7
# The length of an update by the rows and columns of its matrix. Jordan's own; and the root mean square of
# usual updates of AdamW (Liu et al., arXiv 2502.16982, equation 4). The names are torch's.
SCALES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    }
)


def orthogonalised(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return matrices with the same singular vectors, and singular values near 1, by Newton and Schulz.

    Args:
        matrices: shape (rows, columns) or (matrices, rows, columns); products have its precision.
    """
    first, third, fifth = COEFFICIENTS
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices
    # No singular value is above the norm.
    norm = torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True)
    found = found / norm.clamp(min=LEAST_NORM)
    for _ in range(iterations):
        gram = found @ found.mT
        polynomial = add_product(gram, gram, gram, beta=third, alpha=fifth)
        found = add_product(found, polynomial, found, beta=first)
    return found.mT if tall else found


class Muon(WholeMatricesOptimizer):
    """Muon of groups that are to be orthogonalised, AdamW of all others.

    A matrix w with the gradient g steps by

        m = b m + (1 - b) g        u = b m + (1 - b) g
        w -= lr (weight_decay w + scale orthogonalised(u))

    Args:
        params: parameters or groups of them; `orthogonalises` of a group says whether it has matrices.
        lr: the learning rate of all.
        momentum: b.
        betas, eps: of AdamW.
        scale: a name of `SCALES`.
        computes_in: the precision of products; None: bf16 for fp32 matrices on an accelerator, else theirs.
    """

    weft_work = MUON

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        scale: str = "match_rms_adamw",
        computes_in: torch.dtype | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "orthogonalises": True})
        self._scale = SCALES[scale]
        self._computes_in = computes_in

    @torch.no_grad()
    def begin(self) -> None:
        for group, matrix in self.in_groups():
            gradient, state = matrix.grad, self.state[matrix]
            assert gradient is not None, "it is stepped"
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            if self.left_out is not None:
                # It may not be finite.
                gradient.masked_fill_(self.left_out > 0, 0.0)
            arriving = self._unless_left_out(1.0 - group["momentum"], matrix)
            state["momentum_buffer"].lerp_(gradient, arriving)
            gradient.lerp_(state["momentum_buffer"], group["momentum"])

    @torch.no_grad()
    def complete(self, matrix: torch.Tensor) -> None:
        computed = self._computes_in
        if computed is None:
            on_accelerator = matrix.device.type != "cpu" and matrix.dtype == torch.float32
            computed = torch.bfloat16 if on_accelerator else matrix.dtype
        matrix.copy_(orthogonalised(matrix.to(computed), MUON.orthogonalisations))
        matrix.mul_(self._scale(*matrix.shape[-2:]))

    @torch.no_grad()
    def finish(self) -> None:
        for group, matrix in self.in_groups():
            assert matrix.grad is not None, "it is stepped"
            rate = self._unless_left_out(group["lr"], matrix)
            matrix.mul_(1.0 - rate * group["weight_decay"])
            matrix.sub_(matrix.grad.mul_(rate))
        for group in self.param_groups:
            if not group["orthogonalises"]:
                self._step_others(group)

    def _step_others(self, group: Mapping[str, Any]) -> None:
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in stepped]
        for parameter, state in zip(stepped, states, strict=True):
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = map(torch.zeros_like, (parameter, parameter))
                state["step"] = torch.zeros((), dtype=torch.float32)
            # A checkpoint gives the count back in host memory.
            state["step"] = state["step"].to(parameter.device)
        if not stepped:
            return
        first, second = group["betas"]
        adamw(
            stepped,
            [parameter.grad for parameter in stepped if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.left_out,
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _unless_left_out(self, number: float, like: torch.Tensor) -> float | torch.Tensor:
        """Return a number, or 0 for a step that is left out, in the precision of `like`."""
        if self.left_out is None:
            return number
        return torch.where(self.left_out > 0, 0.0, like.new_full((), number))
