"""The linear layers of a stage that K-FAC treats, with the gradients and factors of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.describe.block_products import block_products
from weft.errors import InputError, Violation
from weft.methods.kfac.linears import LinearLayers, Operand, treatable
from weft.methods.kfac.options import NAME
from weft.methods.kfac.runtime.factors import Factor
from weft.methods.kfac.runtime.linear_parts import INPUTS, OUTPUTS, WHOLE, DividedLinear, WholeLinear
from weft.run.parallel.tensor_layers import LinearProduct
from weft.run.parallel.tensor_stage import TensorParallel, tensor_ranks
from weft.run.stage.families.own import OwnStage
from weft.run.stage.stage_module import StageModule

# Tensor ranks have the last one in place of those whose inputs they divide.
_Linear = nn.Linear | Conv1D | LinearProduct


@dataclass(frozen=True, eq=False)
class TreatedLinear:
    """A linear layer, with the gradients that are preconditioned.

    Attributes:
        name: in the stage.
        parameters: its weight, (columns, inner), or (inner, columns) where `transposed`; its bias,
            (columns,), if it has one.
        gradients: of whole parameters, where ranks have them; of this rank's parts, where it is divided.
        rows: the vectors of a sample that it multiplies; None: its tokens.
        parts: the part of it that this rank has.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[torch.Tensor, ...]
    transposed: bool
    factor: Factor
    rows: int | None
    parts: WholeLinear = WHOLE

    def precondition(self, gradient: torch.Tensor, inputs: Factor, damping: float) -> None:
        """Multiply the gradient of a parameter by the results of both sides, in place."""
        is_weight, turned = gradient.ndim == 2, gradient.ndim == 2 and self.transposed
        found = (gradient.mT if turned else gradient).to(self.factor.sum.dtype)
        results = self.factor.used, inputs.used if is_weight else ()
        found = self.factor.multiplied(found, *results, damping, self.parts)
        gradient.copy_(found.mT if turned else found)


@dataclass(frozen=True, eq=False)
class TreatedOperand:
    """The linear layers in a layer of the model that read one value; the first one shows it."""

    linears: tuple[TreatedLinear, ...]
    factor: Factor

    @property
    def mean_output(self) -> torch.Tensor:
        """The mean of the diagonals of the factors of outputs, (); negative before all have one."""
        means = torch.stack([one.factor.mean for one in self.linears])
        return torch.where((means > 0).all(), means.mean(), -1.0)


def treated_operands(
    stage: nn.Module,
    position: int,
    linears: LinearLayers,
    gradients: Mapping[int, torch.Tensor],
    form: type[Factor],
) -> Iterator[TreatedOperand]:
    """Yield the linear layers of a layer by operand, as the plan lists them.

    Raises:
        InputError: if the layer has others.
    """
    names = {id(module): name for name, module in stage.named_modules()}
    found = iter(_linears(stage, position))
    for operand in linears.operands:
        treated: list[TreatedLinear] = []
        inner = operand.inner
        for size in operand.columns:
            module = next(found, None)
            transposed = (
                module.transposed if isinstance(module, LinearProduct) else isinstance(module, Conv1D)
            )
            shape = None if module is None else _whole_shape(stage, names[id(module)], module)
            if module is None or shape != ((inner, size) if transposed else (size, inner)):
                problem = f"layer {position} has no linear layer of {inner} by {size} features in its place"
                raise InputError(Violation(NAME, problem, "a plan of this model"))
            name, parameters = names[id(module)], tuple(module.parameters(recurse=False))
            own = tuple(gradients[id(one)] for one in parameters)
            factor = form(size, _at_least_fp32(own[0]), own[0].device)
            parts = _parts(stage, name, operand)
            treated.append(TreatedLinear(name, parameters, own, transposed, factor, operand.rows, parts))
        first = treated[0].factor.sum
        yield TreatedOperand(tuple(treated), form(inner, first.dtype, first.device))


def _at_least_fp32(gradient: torch.Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def _whole_shape(stage: nn.Module, name: str, module: _Linear) -> tuple[int, ...]:
    own = module.weight.shape
    return tuple(stage.share(f"{name}.weight").whole_shape(own) if isinstance(stage, TensorParallel) else own)


def _parts(stage: nn.Module, name: str, operand: Operand) -> WholeLinear:
    """Return the part of a linear layer that this rank has."""
    if tensor_ranks(stage).size == 1:
        return WHOLE
    assert isinstance(stage, TensorParallel), "tensor ranks divide it"
    side = INPUTS if operand.divides_inner else OUTPUTS
    return DividedLinear(stage.tensor, side, stage.divisions[f"{name}.weight"])


def _linears(stage: nn.Module, position: int) -> Iterator[_Linear]:
    """Yield the linear layers of a layer; of a known family in the order of its description."""
    if isinstance(stage, OwnStage):
        for one in treatable(stage.linears[position]):
            yield cast(nn.Linear, stage.layers[str(position)].get_submodule(one.name))
        return
    assert isinstance(stage, StageModule), "stages are of known families or of own models"
    inside = [
        (name.rpartition(".")[2], one)
        for name, one in stage.block(position).named_modules()
        if isinstance(one, _Linear)
    ]
    for product in block_products(stage.config):
        place = next((index for index, (name, _) in enumerate(inside) if name == product.name), None)
        if place is not None:
            yield inside.pop(place)[1]
