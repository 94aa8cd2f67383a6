"""Which numbers a run computes with and which its optimizers step, by the plan's precision.

In bf16, weights, activations and messages have 16 bits. Gradients are accumulated and reduced in fp32, and
the optimizer steps fp32 masters, of which the weights are rounded copies (Micikevicius et al., arXiv
1710.03740): sums of many small numbers, and small steps of large weights, would be lost to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

# Of parameters, activations and messages.
PRECISIONS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
}

# Of gradients and of what optimizers step; stages are built in it.
STEPPED: Mapping[str, torch.dtype] = {**PRECISIONS, "bf16": torch.float32}


def give(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter be `values`, of its shape, in their precision; its gradient stays in its own."""
    gradient, precision = parameter.grad, parameter.grad_dtype
    parameter.grad = None
    parameter.data = values
    # torch casts what it adds to a gradient to this type.
    parameter.grad_dtype = precision
    parameter.grad = gradient


def lower_precision(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast those parameters that are floating point numbers of another precision."""
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.dtype != dtype:
            give(parameter, parameter.detach().to(dtype))


def at_least_fp32(values: torch.Tensor) -> torch.Tensor:
    """`values` as a loss is computed from them."""
    return values.float() if values.is_floating_point() and values.itemsize < 4 else values
