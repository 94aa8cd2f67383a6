"""A backward pass in two parts: the gradient of the input first, those of the weights later.

The input part goes down the graph to the stage's input and keeps the gradients at the nodes where the weights
join; the weight part goes on from there (Qi et al., arXiv 2401.10241). Autograd is split by torch's own
`torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    stage_backward_input,
    stage_backward_weight,
)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What is left of a backward pass after its input part; `groups` is torch's own record of it."""

    weights: tuple[nn.Parameter, ...]
    groups: list[dict[str, Any]]

    def run(self) -> None:
        """Add to `.grad` of the weights; once only."""
        stage_backward_weight(iter(self.weights), self.groups)


def run_input_part(
    module: nn.Module, inputs: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None
) -> WeightPart:
    """Set `inputs.grad` and return what computes the gradients of the module's weights.

    Inputs that need no gradient (those of a first stage) leave the first weight of the module in their place:
    its gradient is added by this part, which so does as much of the work as it does in any other stage.

    Args:
        module: whose weights the output was computed with.
        inputs, output: of one micro-batch; the output cannot be differentiated again.
        gradient: of the output, of the same shape; None for a loss.
    """
    weights = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
    return input_part(weights, inputs, output, gradient)


def input_part(
    weights: Sequence[nn.Parameter],
    inputs: torch.Tensor,
    output: torch.Tensor,
    gradient: torch.Tensor | None,
) -> WeightPart:
    """The same of an output that was computed with these weights."""
    # The output is cut off its graph in place, which torch does not allow of a view.
    output = output.clone() if output._is_view() else output
    start = inputs if inputs.requires_grad else _first_used(weights, output)
    others = tuple(weight for weight in weights if weight is not start)
    gradients = None if gradient is None else [gradient]
    _, groups = stage_backward_input([output], gradients, [start], iter(others))
    return WeightPart(others, groups)


def _first_used(weights: Sequence[nn.Parameter], output: torch.Tensor) -> nn.Parameter | None:
    """The first of the weights that the output depends on."""
    root = _get_grad_fn_or_grad_acc(output)
    graph = {} if root is None else construct_reverse_graph([root])
    return next((weight for weight in weights if _get_grad_fn_or_grad_acc(weight) in graph), None)
