"""The division of a stage's layers over tensor ranks: of parameters, products and tables.

A family states it in tables of names (`weft.run.stage.stage_module.StageModule`). Its `divide` applies them
to a stage that was built whole on the meta device. Submodules and parameters keep their names, so a rank's
share of a parameter has the name of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.run.parallel.permutation import inverse
from weft.run.parallel.replica_ranks import ReplicaRanks
from weft.run.parallel.tensor_parallel import TensorRanks


@dataclass(frozen=True, slots=True)
class HeldByTensorRanks:
    """A parameter's division over tensor ranks.

    Attributes:
        axis: the divided dimension; None if every rank has the whole parameter.
        blocks: equal parts along the axis, joined in one parameter; each is divided (a product of queries,
            keys and values).
        on_stream: True if a whole parameter computes with the stream between two divided products. If the
            stream is divided, each rank has the gradient of its own tokens; the parameter's gradient is their
            sum.
        in_region: True if a whole parameter computes between two divided products, with this rank's heads.
            The parameter's gradient is the sum of all ranks' gradients, in any case.
    """

    axis: int | None = None
    blocks: int = 1
    on_stream: bool = True
    in_region: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """The division of one parameter over ranks: `length` elements along `axis` in `blocks` equal parts.

    Shares have equal shapes on all ranks. If the length does not divide, shorter shares end with zeros that
    nothing reads. `order` has the elements of the whole as the ranks divide them; empty if they rise.
    """

    axis: int
    blocks: int
    length: int
    order: tuple[int, ...] = ()

    def own_length(self, ranks: ReplicaRanks) -> int:
        """Return the elements of a share along the axis."""
        return self.blocks * -(-self.length // (self.blocks * ranks.size))

    def own(self, whole: torch.Tensor, ranks: ReplicaRanks) -> torch.Tensor:
        """Return a rank's share of a whole parameter or of a state of its shape."""
        share = ranks.share(self.length // self.blocks)
        if self.order:
            whole = whole.index_select(self.axis, torch.tensor(self.order, device=whole.device))
        parts = [
            block.narrow(self.axis, share.start, len(share)) for block in whole.chunk(self.blocks, self.axis)
        ]
        missing = self.own_length(ranks) // self.blocks - len(share)
        if missing:
            shape = [missing if axis == self.axis else size for axis, size in enumerate(whole.shape)]
            parts = [torch.cat([part, part.new_zeros(shape)], self.axis) for part in parts]
        return torch.cat(parts, self.axis)

    def joined(self, shares: Sequence[torch.Tensor], ranks: ReplicaRanks) -> torch.Tensor:
        """Return the whole, joined from the shares of all ranks in the order of their places."""
        length = self.length // self.blocks
        blocks = [share.chunk(self.blocks, self.axis) for share in shares]
        whole = torch.cat(
            [
                blocks[place][block].narrow(self.axis, 0, len(ranks.share(length, place)))
                for block in range(self.blocks)
                for place in range(ranks.size)
            ],
            self.axis,
        )
        if not self.order:
            return whole
        return whole.index_select(self.axis, inverse(torch.tensor(self.order, device=whole.device)))


@dataclass(frozen=True, slots=True)
class Share:
    """The division of a parameter, and of every state of its shape, over the ranks of a replica.

    `along` has the axes of the replica that divide it, in turn. All ranks have the whole if it is empty.
    """

    along: tuple[tuple[Division, ReplicaRanks], ...]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole."""
        for division, ranks in self.along:
            whole = division.own(whole, ranks)
        return whole

    def join(self, own: torch.Tensor) -> torch.Tensor:
        """Return the whole, where this rank's part lies; every rank calls it."""
        for division, ranks in reversed(self.along):
            own = division.joined(list(ranks.gather(own)), ranks)
        return own

    def has_turn(self, turn: int) -> bool:
        """Return True on one of the ranks that divide the parameter, on the next one for the next turn."""
        for _, ranks in self.along:
            turn, place = divmod(turn, ranks.size)
            if place != ranks.place:
                return False
        return True

    def own_shape(self, whole: torch.Size) -> torch.Size:
        return self._with_lengths(whole, [one.own_length(ranks) for one, ranks in self.along])

    def whole_shape(self, own: torch.Size) -> torch.Size:
        return self._with_lengths(own, [one.length for one, _ in self.along])

    def _with_lengths(self, shape: torch.Size, lengths: Iterable[int]) -> torch.Size:
        sizes = list(shape)
        for (division, _), length in zip(self.along, lengths, strict=True):
            sizes[division.axis] = length
        return torch.Size(sizes)


class LinearProduct(nn.Module):
    """A linear layer of a model; `multiply` computes its product with the weight, and may be exchanged."""

    def __init__(self, whole: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.transposed = isinstance(whole, Conv1D)
        self.weight = whole.weight
        self.bias = whole.bias
        self.multiply: Callable[[torch.Tensor], torch.Tensor] = self._multiply

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.finish(self.multiply(value))

    def finish(self, result: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, from that of the product or the sum of all ranks' partial results."""
        return result if self.bias is None else result + self.bias

    def _multiply(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.weight.t() if self.transposed else self.weight)


class RowProduct(LinearProduct):
    """A product with a divided inner dimension: partial sums are added up, then comes the bias.

    `beside` gets the product, its operand and the partial sums. It returns these with more partial sums.
    """

    def __init__(self, whole: nn.Linear | Conv1D, ranks: TensorRanks) -> None:
        super().__init__(whole)
        self._ranks = ranks
        self.beside: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Map (b, s, inner / size) to the stream (b, tokens, width)."""
        partial = self.multiply(value)
        if self.beside is not None:
            partial = self.beside(self, value, partial)
        return partial if self._ranks.elsewhere else self.finish(self._ranks.leave(partial))


def finish(module: nn.Module, summed: torch.Tensor) -> torch.Tensor:
    """Return the result of a module that ends a region, from the sum of all ranks' partial results."""
    assert not isinstance(module, nn.Linear | Conv1D), "ranks have divided the stage"
    return module.finish(summed) if isinstance(module, RowProduct) else summed


class DividedTable(nn.Embedding):
    """A token table with a share of the rows on every rank; tokens of other shares count as zero."""

    def __init__(self, whole: nn.Embedding, ranks: TensorRanks) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, device="meta")
        self._ranks = ranks
        self._share = ranks.share(whole.num_embeddings)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids (b, s) to the stream (b, tokens, width)."""
        here = (tokens >= self._share.start) & (tokens < self._share.stop)
        rows = nn.functional.embedding(torch.where(here, tokens - self._share.start, 0), self.weight)
        return self._ranks.leave(rows * here.unsqueeze(-1))


def enter_before(region: nn.Module, ranks: TensorRanks) -> None:
    """Let a module that begins with products divided by columns read all tokens of the stream.

    A hook does it and no wrapping module, so that the names inside stay.
    """

    def gather_input(
        _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (ranks.enter(arguments[0]), *arguments[1:]), named
        return arguments, {**named, "hidden_states": ranks.enter(named["hidden_states"])}

    region.register_forward_pre_hook(gather_input, with_kwargs=True)


def end_regions(block: nn.Module, names: Iterable[str], ranks: TensorRanks) -> None:
    """Let the block's modules of these names add up the partial results of all ranks.

    A `RowProduct` takes the place of a product. A mixture, whose sums are partial, gets a hook.
    """
    for name in names:
        path, _, leaf = name.rpartition(".")
        parent, last = block.get_submodule(path), block.get_submodule(name)
        if isinstance(last, nn.Linear | Conv1D):
            setattr(parent, leaf, RowProduct(last, ranks))
        else:
            last.register_forward_hook(lambda _, __, partial: ranks.leave(partial))
