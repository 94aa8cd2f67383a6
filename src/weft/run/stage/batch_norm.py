"""Batch norms with running statistics that do not depend on the place and order of micro-batches.

In training, a batch norm normalises a micro-batch by its own mean and variance (Ioffe and Szegedy, arXiv
1502.03167). The batch norm of torch moves its running statistics at every forward pass. So they depend on the
order of micro-batches and on the number of reruns of a layer. Here they move once per step, towards the mean
over the step's micro-batches.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class StepBatchNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` with its names; its running statistics move at the end of a step.

    They are held in fp32 or wider. `num_batches_tracked` counts steps.
    """

    def __init__(self, features: int, *, eps: float, momentum: float) -> None:
        super().__init__(features, eps=eps, momentum=momentum)
        # Statistics are no parameters: `materialise` gives them no values, so they skip the meta device.
        self.register_buffer("running_mean", torch.zeros(features, device="cpu"))
        self.register_buffer("running_var", torch.ones(features, device="cpu"))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device="cpu"))
        self._momentum = momentum
        self._last: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._counted = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise maps (b, channels, height, width) to the same shape."""
        if not self.training:
            mean, variance = (value.to(inputs.dtype) for value in self.statistics())
            return functional.batch_norm(inputs, mean, variance, self.weight, self.bias, eps=self.eps)
        if self._last is None:
            self._last = inputs.new_zeros(2, self.num_features)
        # With a momentum of one the two take the values of this micro-batch alone.
        mean, variance = self._last
        return functional.batch_norm(
            inputs, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
        )

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return running mean and unbiased variance, each of shape (channels,), to be changed in place."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    def count(self) -> None:
        """Add the last forward pass to the mean of the step."""
        assert self._last is not None, "a forward pass is counted after it has run"
        if self._sum is None:
            self._sum = torch.zeros_like(self._last, dtype=_wide(self._last.dtype))
        self._sum += self._last
        self._counted += 1

    def end_step(self, left_out: torch.Tensor | None = None) -> None:
        """Move the running statistics towards the mean of the passes counted since the last step.

        If `left_out`, of shape (), is not 0, they stay. The host does not read it.
        """
        if self._sum is None or not self._counted:
            return
        assert self._last is not None
        assert self.num_batches_tracked is not None
        for running, total in zip(self.statistics(), self._sum, strict=True):
            moved = running.lerp((total / self._counted).to(running.dtype), self._momentum)
            running.copy_(moved if left_out is None else torch.where(left_out > 0, running, moved))
        self.num_batches_tracked += 1 if left_out is None else left_out <= 0
        self._sum.zero_()
        # The next pass multiplies it by zero, which keeps what is not finite.
        self._last.zero_()
        self._counted = 0


def hold_statistics(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the running statistics of all batch norms to the precision of the weights, at least fp32."""
    for part in module.modules():
        if isinstance(part, StepBatchNorm):
            part.running_mean, part.running_var = (value.to(_wide(dtype)) for value in part.statistics())


def use_step_batch_norms(module: nn.Module) -> None:
    """Replace every batch norm inside a module with a `StepBatchNorm`."""
    for name, part in module.named_children():
        if type(part) is nn.BatchNorm2d:
            assert part.momentum is not None, "the batch norms of known families have a momentum"
            setattr(module, name, StepBatchNorm(part.num_features, eps=part.eps, momentum=part.momentum))
        else:
            use_step_batch_norms(part)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
