"""Rows whose gradients are multiplied by inverse curvature; one process takes it of whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method, Told
from small_plans import tiny
from transformers.pytorch_utils import Conv1D

from weft.describe.block_products import block_products
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.methods.kfac.options import operands_of, operands_text

DAMPING = 1e-2
# By copy and module: the inputs and the output gradients of a step's micro-batches.
_SEEN: WeakKeyDictionary[Copy, dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]] = WeakKeyDictionary()
_INVERSES: WeakKeyDictionary[Copy, dict[str, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


def kfac(model: ModelConfig, every: int = 1) -> Choice:
    operands = operands_text(operands_of(model))
    return Choice(name="kfac", options={"damping": DAMPING, "every": every, "operands": operands})


@dataclass(frozen=True)
class Kfac(Method):
    """K-FAC that inverts behind every so many steps, of all of the model at once."""

    model: ModelConfig
    every: int = 1

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (kfac(self.model, self.every),)

    def begin(self, copies: Any) -> None:
        for copy in copies:
            seen = _SEEN[copy] = {}
            for name, module in copy.model.named_modules():
                if isinstance(module, torch.nn.Linear | Conv1D) and "lm_head" not in name:
                    seen[name] = ([], [])
                    module.register_forward_hook(_keeper(*seen[name]))

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        if step % self.every == 0:
            _INVERSES[copy] = _inverses(self.model, _SEEN[copy])
        for inputs, gradients in _SEEN[copy].values():
            inputs.clear()
            gradients.clear()
        modules = dict(copy.masters.named_modules())
        for name, (inner, outer) in _INVERSES[copy].items():
            module = modules[name]
            weight = module.weight.grad
            transposed = isinstance(module, Conv1D)
            module.weight.grad = inner @ weight @ outer if transposed else outer @ weight @ inner
            if module.bias is not None:
                module.bias.grad = outer @ module.bias.grad


def _keeper(inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> Callable[..., None]:
    def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            inputs.append(given[0].detach().flatten(0, -2))
            output.register_hook(lambda one: gradients.append(one.flatten(0, -2)))

    return keep


def _inverses(
    model: ModelConfig, seen: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The textbook: both factors of each layer from all rows of the step, and their damped inverses."""
    reads = {}
    products = block_products(model)
    for first in range(0, len(seen), len(products)):
        for product, name in zip(products, list(seen)[first : first + len(products)], strict=True):
            reads.setdefault((first, product.reads), []).append(name)
    found = {}
    for names in reads.values():
        inputs = torch.cat(seen[names[0]][0]).double()
        tokens = len(inputs)
        side = inputs.T @ inputs / tokens
        gradients = {name: tokens * torch.cat(seen[name][1]).double() for name in names}
        outer = {name: one.T @ one / tokens for name, one in gradients.items()}
        mean = sum(one.diagonal().mean() for one in outer.values()) / len(outer)
        inner = _inverse(side, (side.diagonal().mean() / mean).sqrt())
        for name in names:
            ratio = (side.diagonal().mean() / outer[name].diagonal().mean()).sqrt()
            found[name] = inner, _inverse(outer[name], 1.0 / ratio)
    return found


def _inverse(matrix: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(matrix + DAMPING**0.5 * ratio * torch.eye(len(matrix)).double())


def _row(
    model: ModelConfig, *args: Any, every: int = 1, methods: tuple[Method, ...] = (), **kwargs: Any
) -> Row:
    return Row(model, *args, methods=(Kfac(model, every), *methods), steps=3, **kwargs)


GPT, LLAMA = tiny(layers=4), tiny("llama", layers=4)
ROWS = (
    _row(GPT),
    _row(LLAMA, every=2),
    _row(GPT, "gpipe", pp=2, every=2),
    _row(LLAMA, "1f1b", pp=2, dp=2),
    _row(GPT, "breadth-first", pp=2, dp=2, loops=2, recompute="full"),
    _row(LLAMA, "depth-first", pp=2, loops=2, recompute="selective"),
    _row(GPT, "zb-h1", pp=2, every=2),
    _row(LLAMA, "zb-v", pp=2, loops=2),
    _row(GPT, "1f1b", pp=2, dp=2, methods=(Clips(),)),
    _row(LLAMA, "1f1b", pp=2, optimizer="lamb"),
)
