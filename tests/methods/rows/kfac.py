"""Rows whose gradients are multiplied by inverse curvature; one process takes it of whole steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from curvature_versions import NEVER, BlockVersions, Version, versions_in
from equality_table import Row
from filled_plans import DAMPING, fills, kfac, placed
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method, Told
from small_plans import divisible, make_program, tiny
from transformers.pytorch_utils import Conv1D

from weft.describe.block_products import block_products
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.methods.bubble_filling.options import options_of
from weft.methods.kfac.report import AGE

IN_BLOCKS = re.compile(r"\.\d+\.")


class Sums(NamedTuple):
    """The factors of one linear layer's inputs and outputs in a step, (n, n)."""

    inputs: torch.Tensor
    outputs: torch.Tensor


# By copy: the rows of the current step by name; and by step, the factors of every linear layer by block.
_ROWS: WeakKeyDictionary[Copy, dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]] = WeakKeyDictionary()
_SUMS: WeakKeyDictionary[Copy, list[list[list[tuple[str, Sums]]]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Kfac(Method):
    """K-FAC with the inverses that a program uses, of whole steps.

    Attributes:
        every: steps between inverses, for work that fills no bubbles.
        windows: of each stage, for work that does.
        versions: by step and block.
    """

    model: ModelConfig
    every: int = 1
    windows: str = ""
    versions: tuple[tuple[BlockVersions, ...], ...] = ()

    def __repr__(self) -> str:
        return f"K-FAC in {self.windows}" if self.windows else f"K-FAC every {self.every}"

    @property
    def choices(self) -> tuple[Choice, ...]:
        bubbles = (fills(windows=self.windows),) if self.windows else ()
        return (kfac(self.model, self.every), *bubbles)

    def begin(self, copies: Any) -> None:
        for copy in copies:
            _SUMS[copy], rows = [], _ROWS.setdefault(copy, {})
            for name, module in copy.model.named_modules():
                if isinstance(module, torch.nn.Linear | Conv1D) and IN_BLOCKS.search(name):
                    rows[name] = ([], [])
                    module.register_forward_hook(_keeper(*rows[name]))

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        _SUMS[copy].append(list(self._blocks_of(copy)))
        used = [NEVER if one is None else one[0][0].sum for one in self.versions[step]]
        told[AGE] = [step - sum(used) / len(used)]
        modules = dict(copy.masters.named_modules())
        for block, versions in enumerate(self.versions[step]):
            if versions is not None:
                self._precondition(modules, _SUMS[copy], block, *versions)

    def _blocks_of(self, copy: Copy) -> Iterator[list[tuple[str, Sums]]]:
        """Yield the factors of a step's rows, block by block."""
        rows, products = _ROWS[copy], len(block_products(self.model))
        names = list(rows)
        for first in range(0, len(names), products):
            block = []
            for name in names[first : first + products]:
                inputs, gradients = (torch.cat(one).double() for one in rows[name])
                tokens = len(inputs)
                # Of the loss of each token, which has a share of the mean.
                gradients = gradients * tokens
                block.append((name, Sums(inputs.T @ inputs / tokens, gradients.T @ gradients / tokens)))
                for kept in rows[name]:
                    kept.clear()
            yield block

    def _precondition(
        self,
        modules: dict[str, torch.nn.Module],
        steps: list[list[list[tuple[str, Sums]]]],
        block: int,
        inputs: tuple[Version, ...],
        outputs: tuple[Version, ...],
    ) -> None:
        products = block_products(self.model)
        operands = list(dict.fromkeys(one.reads for one in products))
        for number, product in enumerate(products):
            operand = operands.index(product.reads)
            same = [place for place, one in enumerate(products) if one.reads == product.reads]
            name = steps[0][block][number][0]

            def mean_inputs(step: int, first: int = same[0]) -> torch.Tensor:
                return steps[step][block][first][1].inputs.diagonal().mean()

            def mean_outputs(step: int, places: tuple[int, ...] = tuple(same)) -> torch.Tensor:
                each = [steps[step][block][one][1].outputs.diagonal().mean() for one in places]
                return sum(each) / len(each)

            version = inputs[operand]
            ratio = 1.0
            if version.other != NEVER:
                ratio = (mean_inputs(version.sum) / mean_outputs(version.other)).sqrt()
            inner = _inverse(steps[version.sum][block][same[0]][1].inputs, ratio)
            version, ratio = outputs[number], 1.0
            if version.other != NEVER:
                ratio = (mean_outputs(version.sum, (number,)) / mean_inputs(version.other)).sqrt()
            outer = _inverse(steps[version.sum][block][number][1].outputs, ratio)
            weight, module = modules[name].weight.grad, modules[name]
            module.weight.grad = (
                inner @ weight @ outer if isinstance(module, Conv1D) else outer @ weight @ inner
            )
            if module.bias is not None:
                module.bias.grad = outer @ module.bias.grad


def _keeper(inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> Callable[..., None]:
    def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            inputs.append(given[0].detach().flatten(0, -2))
            output.register_hook(lambda one: gradients.append(one.flatten(0, -2)))

    return keep


def _inverse(matrix: torch.Tensor, ratio: torch.Tensor | float) -> torch.Tensor:
    return torch.linalg.inv(matrix + DAMPING**0.5 * ratio * torch.eye(len(matrix)).double())


def _row(
    model: ModelConfig,
    *layout: Any,
    every: int = 1,
    bubbles: Choice | None = None,
    methods: tuple[Method, ...] = (),
    steps: int = 3,
    **options: Any,
) -> Row:
    own = Kfac(model, every)
    if bubbles is not None:
        plan = Row(model, *layout, methods=(own,), **options).plan
        asked = plan.model_copy(update={"methods": (*plan.methods, bubbles)})
        own = Kfac(model, every, options_of(placed(model, asked)).windows)
    plan = Row(model, *layout, methods=(own,), **options).plan
    own = replace(own, versions=versions_in(make_program(model, plan), steps))
    return Row(model, *layout, methods=(own, *methods), steps=steps, **options)


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
    _row(divisible("bert", tied=True), "1f1b", pp=2),
    _row(divisible("vit"), "zb-h1", pp=2, every=2),
    # Work in bubbles: windows of several steps, whose first pieces are of the window before.
    _row(GPT, "gpipe", pp=2, bubbles=fills(), steps=5),
    _row(LLAMA, "1f1b", pp=4, bubbles=fills("official"), steps=6),
    _row(GPT, "1f1b", pp=2, dp=2, bubbles=fills(), steps=6, methods=(Clips(),)),
    _row(LLAMA, "breadth-first", pp=2, loops=2, bubbles=fills(), steps=7),
    _row(GPT, "zb-h1", pp=4, bubbles=fills(most_steps=4), steps=9),
    _row(LLAMA, "zb-v", pp=2, loops=2, bubbles=fills(), steps=6, recompute="full"),
)
