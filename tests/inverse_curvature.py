"""K-FAC of one process, which takes inverse curvature of whole steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from curvature_versions import NEVER, BlockVersions, Version
from filled_plans import DAMPING, fills, kfac
from one_process import Copy, Method, Told
from transformers.pytorch_utils import Conv1D

from weft.describe.block_products import block_products
from weft.describe.families.own import FAMILY, own_model
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.methods.kfac.report import AGE

IN_BLOCKS = re.compile(r"\.\d+\.")


class Sums(NamedTuple):
    """The factors of one linear layer's inputs and outputs in a step, (n, n)."""

    inputs: torch.Tensor
    outputs: torch.Tensor


class Product(NamedTuple):
    """A linear layer of one process, by its name, and the number of its operand in its layer."""

    name: str
    operand: int


def products_in(config: ModelConfig, modules: Mapping[str, torch.nn.Module]) -> list[list[Product]]:
    """The linear layers of a model, layer by layer, of those that have any."""
    if config.family == FAMILY:
        own = own_model(config.name)
        numbered = (
            (f"layers.{position}.{one.name}".rstrip("."), position, one.reads)
            for position in range(config.layers + 2)
            for one in own.linears(position)
        )
        layers: dict[int, list[Product]] = {}
        for name, position, operand in numbered:
            layers.setdefault(position, []).append(Product(name, operand))
        return list(layers.values())
    reads = [one.reads for one in block_products(config)]
    operands = list(dict.fromkeys(reads))
    names = [
        name
        for name, one in modules.items()
        if isinstance(one, torch.nn.Linear | Conv1D) and IN_BLOCKS.search(name)
    ]
    return [
        [
            Product(name, operands.index(read))
            for name, read in zip(names[first : first + len(reads)], reads, strict=True)
        ]
        for first in range(0, len(names), len(reads))
    ]


# By copy: the rows of the current step by name; and by step, the factors of every linear layer by name.
_ROWS: WeakKeyDictionary[Copy, dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]] = WeakKeyDictionary()
_SUMS: WeakKeyDictionary[Copy, list[dict[str, Sums]]] = WeakKeyDictionary()


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
    form: str = "inverse"

    def __repr__(self) -> str:
        when = f"in {self.windows}" if self.windows else f"every {self.every}"
        return f"K-FAC {when}" if self.form == "inverse" else f"K-FAC by {self.form} {when}"

    @property
    def choices(self) -> tuple[Choice, ...]:
        bubbles = (fills(windows=self.windows),) if self.windows else ()
        return (kfac(self.model, self.every, self.form), *bubbles)

    def begin(self, copies: Any) -> None:
        for copy in copies:
            _SUMS[copy], rows = [], _ROWS.setdefault(copy, {})
            modules = dict(copy.model.named_modules())
            for name in (one.name for some in products_in(self.model, modules) for one in some):
                rows[name] = ([], [])
                modules[name].register_forward_hook(_keeper(*rows[name]))

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        _SUMS[copy].append(dict(_sums_of(copy)))
        used = [NEVER if one is None else one[0][0].sum for one in self.versions[step]]
        told[AGE] = [step - sum(used) / len(used)]
        modules = dict(copy.masters.named_modules())
        layers = products_in(self.model, modules)
        for products, versions in zip(layers, self.versions[step], strict=True):
            if versions is not None:
                multiply = _precondition if self.form == "inverse" else _solve
                multiply(modules, _SUMS[copy], products, *versions)


def _sums_of(copy: Copy) -> Iterator[tuple[str, Sums]]:
    """Yield the factors of a step's rows by the linear layer's name."""
    for name, rows in _ROWS[copy].items():
        inputs, gradients = (torch.cat(one).double() for one in rows)
        count = len(inputs)
        # Of the loss of each row, which has a share of the mean.
        gradients = gradients * count
        yield name, Sums(inputs.T @ inputs / count, gradients.T @ gradients / count)
        for kept in rows:
            kept.clear()


def _precondition(
    modules: dict[str, torch.nn.Module],
    steps: list[dict[str, Sums]],
    products: list[Product],
    inputs: tuple[Version, ...],
    outputs: tuple[Version, ...],
) -> None:
    """Multiply the gradients of a layer by the inverses of versions."""
    for number, (name, operand) in enumerate(products):
        same = [one.name for one in products if one.operand == operand]

        def mean_inputs(step: int, first: str = same[0]) -> torch.Tensor:
            return steps[step][first].inputs.diagonal().mean()

        def mean_outputs(step: int, names: tuple[str, ...] = tuple(same)) -> torch.Tensor:
            each = [steps[step][one].outputs.diagonal().mean() for one in names]
            return sum(each) / len(each)

        version = inputs[operand]
        ratio = 1.0
        if version.other != NEVER:
            ratio = (mean_inputs(version.sum) / mean_outputs(version.other)).sqrt()
        inner = _inverse(steps[version.sum][same[0]].inputs, ratio)
        version, ratio = outputs[number], 1.0
        if version.other != NEVER:
            ratio = (mean_outputs(version.sum, (name,)) / mean_inputs(version.other)).sqrt()
        outer = _inverse(steps[version.sum][name].outputs, ratio)
        weight, module = modules[name].weight.grad, modules[name]
        module.weight.grad = inner @ weight @ outer if isinstance(module, Conv1D) else outer @ weight @ inner
        if module.bias is not None:
            module.bias.grad = outer @ module.bias.grad


def _solve(
    modules: dict[str, torch.nn.Module],
    steps: list[dict[str, Sums]],
    products: list[Product],
    inputs: tuple[Version, ...],
    outputs: tuple[Version, ...],
) -> None:
    """Solve for the gradients of a layer with the damped product of both factors, and for biases with one."""
    for number, (name, operand) in enumerate(products):
        first = next(one.name for one in products if one.operand == operand)
        inner, outer = steps[inputs[operand].sum][first].inputs, steps[outputs[number].sum][name].outputs
        module = modules[name]
        turned = isinstance(module, Conv1D)
        gradient = module.weight.grad.mT if turned else module.weight.grad
        damped = torch.kron(outer, inner) + DAMPING * torch.eye(len(outer) * len(inner)).double()
        found = torch.linalg.solve(damped, gradient.flatten()).view_as(gradient)
        module.weight.grad = found.mT if turned else found
        if module.bias is not None:
            of_bias = outer + DAMPING * torch.eye(len(outer)).double()
            module.bias.grad = torch.linalg.solve(of_bias, module.bias.grad)


def _keeper(inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> Callable[..., None]:
    def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            inputs.append(given[0].detach().flatten(0, -2))
            output.register_hook(lambda one: gradients.append(one.flatten(0, -2)))

    return keep


def _inverse(matrix: torch.Tensor, ratio: torch.Tensor | float) -> torch.Tensor:
    return torch.linalg.inv(matrix + DAMPING**0.5 * ratio * torch.eye(len(matrix)).double())
