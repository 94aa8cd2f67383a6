"""`GradientBucket`: all gradients of a stage in one flat tensor.

The parameters' `.grad` are views into it: backward accumulates in place, a reduction moves one tensor, and
clearing is one operation.
"""

from __future__ import annotations

import torch
from torch import nn


class GradientBucket:
    """Flat gradients of one stage, zero-padded so that `shards` ranks can share it equally.

    A parameter that is used twice (tied weights) has one gradient. Do not set `.grad` to None: use `clear`.
    """

    def __init__(self, module: nn.Module, shards: int = 1) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        length = sum(parameter.numel() for parameter in parameters)
        dtype = parameters[0].dtype if parameters else torch.float32
        self.flat = torch.zeros(-(-length // shards) * shards, dtype=dtype)
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def clear(self) -> None:
        self.flat.zero_()
