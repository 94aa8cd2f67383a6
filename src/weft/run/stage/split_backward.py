"""A backward pass in two parts: the gradient of the input first, those of the weights later.

The input part goes down the graph to the stage's input. It keeps the gradients at the nodes where the weights
join. The weight part goes on from there (Qi et al., arXiv 2401.10241). torch's own
`torch.distributed.pipelining` splits autograd.
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
    """The rest of a backward pass after its input part; `groups` is torch's own record of it."""

    weights: tuple[nn.Parameter, ...]
    groups: list[dict[str, Any]]

    def run(self) -> None:
        """Add to `.grad` of the weights; once only."""
        # From a weight's last use the way to its first one leads through layers of other weights.
        through_others = any(len(group["intermediates"]) > 1 for group in self.groups)
        stage_backward_weight(iter(self.weights), self.groups, retain_graph=through_others)


def leaves_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that outputs depend on, each once, in the order of their first uses."""
    waiting: list[Any] = [_get_grad_fn_or_grad_acc(one) for one in outputs if one.requires_grad]
    seen, used = set(waiting), dict[int, tuple[int, torch.Tensor]]()
    while waiting:
        node = waiting.pop()
        for one, _ in node.next_functions:
            if (leaf := getattr(one, "variable", None)) is not None:
                first = used.get(id(leaf), (node._sequence_nr(), leaf))
                used[id(leaf)] = (min(first[0], node._sequence_nr()), leaf)
            elif one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
        if (leaf := getattr(node, "variable", None)) is not None:
            used[id(leaf)] = (-1, leaf)
    return [leaf for _, leaf in sorted(used.values(), key=lambda one: one[0])]


def run_input_part(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> WeightPart:
    """Set `grad` of the inputs and return the part that computes the gradients of the module's weights.

    In a first stage an output may depend on no input with a gradient. Then the first weight that it depends
    on takes the input's place. This part adds the weight's gradient, and so does as much work as in any other
    stage.

    Args:
        module: the module that computed the outputs.
        inputs, outputs: those of one micro-batch; the outputs cannot be differentiated again.
        gradients: those of the outputs, of their shapes; None for a loss.
    """
    return input_part(tuple(module.parameters()), inputs, outputs, gradients)


def input_part(
    weights: Sequence[nn.Parameter],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> WeightPart:
    """Set `grad` of the inputs, as `run_input_part`, for outputs computed with these weights."""
    weights = [weight for weight in weights if weight.requires_grad]
    if not weights and not any(output.requires_grad for output in outputs):
        # Frozen layers before the first trained parameter of a model.
        return WeightPart((), [])
    # Outputs are detached from their graph in place, which torch does not allow for a view.
    outputs = [output.clone() if output._is_view() else output for output in outputs]
    starts = _starts([one for one in inputs if one.requires_grad], weights, outputs)
    others = tuple(weight for weight in weights if not any(weight is start for start in starts))
    # A loss has no gradient: torch accepts None, but its types do not state it.
    _, groups = stage_backward_input(outputs, list(gradients), starts, iter(others))  # type: ignore[arg-type]
    return WeightPart(others, groups)


def _starts(
    inputs: Sequence[torch.Tensor], weights: Sequence[nn.Parameter], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the inputs, and for each output that depends on none the first weight that it depends on."""
    starts = list(inputs)
    if inputs and len(outputs) == 1:
        return starts
    for output in outputs:
        root = _get_grad_fn_or_grad_acc(output)
        graph = {} if root is None else construct_reverse_graph([root])
        if not any(_get_grad_fn_or_grad_acc(start) in graph for start in starts):
            starts += [weight for weight in weights if _get_grad_fn_or_grad_acc(weight) in graph][:1]
    return starts
