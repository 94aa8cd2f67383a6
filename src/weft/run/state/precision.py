"""The precisions of a run's computations and of its optimizer steps, by the plan's precision.

In bf16 and fp16, weights, activations and messages have 16 bits. Gradients are accumulated and reduced in
fp32, those of fp16 times the factor of the losses (`weft.run.state.loss_scale`). The optimizer steps fp32
masters, and the weights are rounded copies of them (Micikevicius et al., arXiv 1710.03740). Otherwise
rounding would lose sums of many small numbers, and small steps of large weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

# The type of parameters, activations and messages.
PRECISIONS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

# The type of gradients and of the masters that optimizers step; stages are built in it.
STEPPED: Mapping[str, torch.dtype] = {**PRECISIONS, "bf16": torch.float32, "fp16": torch.float32}


def give(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter's data to `values`, of its shape, in their precision; its gradient keeps its own."""
    gradient, precision = parameter.grad, parameter.grad_dtype
    parameter.grad = None
    parameter.data = values
    # torch casts the summands of a gradient to this type.
    parameter.grad_dtype = precision
    parameter.grad = gradient


def lower_precision(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast the floating point parameters of another precision to `dtype`."""
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.dtype != dtype:
            give(parameter, parameter.detach().to(dtype))


def at_least_fp32(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in the precision of a loss: fp32 or more."""
    return values.float() if values.is_floating_point() and values.itemsize < 4 else values
