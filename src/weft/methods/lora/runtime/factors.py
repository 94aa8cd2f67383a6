"""Low-rank products in a stage: `lora_A` and `lora_B` beside its frozen linear layers.

Parameters have the names of the peft library. A starts with random values, of the variance of peft's.
B starts with zeros, so that training starts from the model's own function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.describe.block_products import block_products, products_in
from weft.describe.plan import Choice
from weft.errors import InputError, Violation
from weft.methods.lora.options import NAME, A, B, LowRank, read_options
from weft.methods.lora.runtime.few_bits import pack
from weft.run.parallel.tensor_layers import HeldByTensorRanks, LinearProduct, RowProduct
from weft.run.stage.stage_module import AddedModule, ChangedStageOf, Initial, StageModule

# Each tensor rank computes with its own heads or columns, so that ranks add up the gradients.
_WHOLE = HeldByTensorRanks(in_region=True)

_DROPOUT = "lora_dropout"
Product = nn.Linear | Conv1D | LinearProduct


class LowRankFactor(AddedModule):
    """One of the two products: values (..., inner) to (..., columns).

    Args:
        deviation: of the initial values; 0 for zeros.
    """

    def __init__(self, inner: int, columns: int, deviation: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, inner))
        self._deviation = deviation

    def initial(self, name: str) -> Initial:
        return Initial(deviation=self._deviation)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(values, self.weight)


class WholeDropout(nn.Module):
    """A dropout that leaves out the same elements on all cuts of a model.

    Each rank draws for all tokens and for the whole inner side, and takes its own part.

    Args:
        share: the dropped share of the elements.
        inner: the elements of a whole operand.
        by_rows: whether tensor ranks divide them.
    """

    def __init__(self, share: float, stage: StageModule, inner: int, *, by_rows: bool) -> None:
        super().__init__()
        self.p = share
        self._inner, self._by_rows = inner, by_rows
        self._tensor, self._context = stage.tensor, stage.context

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        samples, tokens = values.shape[0], values.shape[1] * self._context.size
        whole = torch.empty(samples, tokens, self._inner, dtype=torch.bool, device=values.device)
        kept = self._context.own_tokens(whole.bernoulli_(1.0 - self.p))
        if self._by_rows:
            own = self._tensor.share(self._inner)
            kept = kept[..., own.start : own.stop].contiguous()
        return torch.where(kept, values / (1.0 - self.p), 0.0)


def adapt(stage: StageModule, layers: Sequence[int], choice: Choice) -> None:
    """Freeze a stage, and add low-rank products beside the linear layers of its blocks.

    All linear layers of the blocks are packed later if the choice has a base in few bits.

    Raises:
        InputError: if a block lacks a linear layer that its description names.
    """
    low_rank, products = read_options(choice), block_products(stage.config)
    chosen = low_rank.chosen(products)
    stage.requires_grad_(False)
    for index, block in zip(stage.block_indices, stage.blocks, strict=True):
        named, names = (
            {one.name for one in products_in(stage.config, index, some)} for some in (products, chosen)
        )
        if low_rank.base is not None:
            for name, one in _exchangeable(stage, block, named):
                stage.packers[f"{name}.weight"] = partial(pack, one, low_rank.base)
        found = list(_products(stage, block, names))
        if missing := names - {name.rpartition(".")[2] for name, _ in found}:
            raise InputError(Violation(NAME, f"a block of {stage.config.name} has no {sorted(missing)[0]}"))
        for name, product in found:
            _add(stage, name, product, low_rank)


def _products(stage: StageModule, block: nn.Module, names: set[str]) -> Iterator[tuple[str, Product]]:
    """Yield the linear layers of a block with one of these names, by their names in the stage."""
    inside = {id(module) for module in block.modules()}
    for name, module in stage.named_modules():
        if id(module) in inside and name.rpartition(".")[2] in names and isinstance(module, Product):
            yield name, module


def _exchangeable(
    stage: StageModule, block: nn.Module, names: set[str]
) -> Iterator[tuple[str, LinearProduct]]:
    """Yield the linear layers of a block with these names, put in place of those that cannot be packed."""
    for name, product in list(_products(stage, block, names)):
        if isinstance(product, nn.Linear | Conv1D):
            path, _, leaf = name.rpartition(".")
            product = LinearProduct(product)
            setattr(stage.get_submodule(path), leaf, product)
        yield name, product


def _add(stage: StageModule, name: str, product: Product, low_rank: LowRank) -> None:
    """Add both products beside one linear layer, whose weight still has the shape of the whole."""
    transposed = product.transposed if isinstance(product, LinearProduct) else isinstance(product, Conv1D)
    inner, columns = product.weight.shape if transposed else reversed(product.weight.shape)
    # A stage that no ranks divide may have replicas that some do.
    division = stage.possible_divisions().get(f"{name}.weight")
    inside = division is not None and division.axis == (0 if transposed else 1)
    by_rows = isinstance(product, RowProduct)
    rank = low_rank.rank
    # Uniform values between -1 / sqrt(inner) and 1 / sqrt(inner) have this deviation.
    down, up = LowRankFactor(inner, rank, (3.0 * inner) ** -0.5), LowRankFactor(rank, columns)
    divides_columns = division is not None and not inside
    stage.add(f"{name}.{A}", down, HeldByTensorRanks(axis=1) if inside else _WHOLE)
    stage.add(
        f"{name}.{B}",
        up,
        HeldByTensorRanks(axis=0, blocks=division.blocks) if divides_columns and division else _WHOLE,
    )

    if low_rank.dropout:
        product.add_module(_DROPOUT, WholeDropout(low_rank.dropout, stage, inner, by_rows=by_rows))
    beside = partial(_add_low_rank, scale=low_rank.scale)
    if isinstance(product, RowProduct):
        product.beside = beside
    else:
        product.register_forward_hook(lambda module, given, result: beside(module, given[0], result))


def _add_low_rank(
    product: nn.Module, values: torch.Tensor, result: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Return the result of a linear layer, and of the products that stand beside it."""
    dropout = getattr(product, _DROPOUT, None)
    left = values if dropout is None else dropout(values)
    added = product.get_submodule(B)(product.get_submodule(A)(left))
    return torch.add(result, added, alpha=scale)


CHANGED_STAGE = ChangedStageOf(method=NAME, change=adapt)
