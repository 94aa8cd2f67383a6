"""`ChunkedLogits`: logits and cross entropy of one chunk of tokens after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft.describe.layer_choices import Value
from weft.methods.loss_kernels.chunks import chunk_tokens
from weft.run.parallel.divided_logits import IGNORED, DividedLogits, softmax_of_share
from weft.run.parallel.function import Function
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.parallel.unmade_logits import UnmadeLogits
from weft.run.state.precision import at_least_fp32


@dataclass(frozen=True, slots=True)
class ChunkedLogits(UnmadeLogits):
    """Logits that are made for a chunk of tokens at a time; `chunks`: its tokens, or "by size"."""

    chunks: Value

    def total_cross_entropy(self, targets: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Return the sum over the targets (...) that are not `ignored`; the same number on all ranks."""
        given = (self.hidden.flatten(0, -2), self.weight, self.bias)
        wanted = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
        total: torch.Tensor = _ChunkedCrossEntropy.apply(
            *given, self.detach()._head, targets.flatten(), ignored, wanted
        )
        return total

    def argmax(self) -> torch.Tensor:
        """Return the class of the largest logit, shape (...)."""
        head = self.detach()._head
        return torch.cat([head.argmax(logits) for _, logits in head.chunks()]).view(self.hidden.shape[:-1])

    @property
    def _head(self) -> _ChunkedHead:
        chunk = chunk_tokens(self.chunks, self.hidden.shape[-1])
        return _ChunkedHead(
            self.hidden.flatten(0, -2), self.weight, self.bias, chunk, self.vocabulary, self.ranks
        )


@dataclass(frozen=True, slots=True)
class _ChunkedHead:
    """The product of vectors (tokens, width) with the vocabulary, in chunks of `chunk` tokens."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    chunk: int
    vocabulary: int
    ranks: TensorRanks

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the tokens of each chunk and its logits (chunk, columns), all in one room."""
        tokens = len(self.hidden)
        room = self.hidden.new_empty(min(self.chunk, tokens), len(self.weight))
        for first in range(0, tokens, self.chunk):
            part = slice(first, min(first + self.chunk, tokens))
            logits = room[: part.stop - first]
            # Recomputation keeps the results of products, but not of those into a given room.
            if self.bias is None:
                torch.mm(self.hidden[part], self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, self.hidden[part], self.weight.t(), out=logits)
            yield part, logits

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the classes of the largest of a chunk's logits."""
        if self.ranks.size == 1:
            return logits.argmax(1)
        return DividedLogits(logits, self.vocabulary, self.ranks).argmax()


class _Gradients:
    """The gradients of a sum of losses: of vectors in their precision, of weights in fp32 or wider.

    Weights sum up over many chunks, in which 16 bits would lose small parts. Frozen weights have none.

    Args:
        trains_weight, trains_bias: True if these have gradients.
    """

    def __init__(self, head: _ChunkedHead, *, trains_weight: bool, trains_bias: bool) -> None:
        self._head = head
        wide = at_least_fp32(head.hidden[:0]).dtype
        self.hidden = torch.empty_like(head.hidden)
        self.weight = torch.zeros_like(head.weight, dtype=wide) if trains_weight else None
        self.bias = torch.zeros_like(head.bias, dtype=wide) if head.bias is not None and trains_bias else None
        adds_elsewhere = trains_weight and wide != head.weight.dtype
        self._room = torch.empty_like(head.weight) if adds_elsewhere else None

    def add(self, part: slice, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a chunk's gradient of the logits, in fp32 or wider; `logits` is a room in their precision."""
        if self.bias is not None:
            self.bias += gradient.sum(0)
        if gradient.dtype != logits.dtype:
            gradient = logits.copy_(gradient)
        if self.weight is not None and self._room is not None:
            self.weight += torch.mm(gradient.t(), self._head.hidden[part], out=self._room)
        elif self.weight is not None:
            self.weight.addmm_(gradient.t(), self._head.hidden[part])
        torch.mm(gradient, self._head.weight, out=self.hidden[part])


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: _ChunkedHead,
        targets: torch.Tensor,
        ignored: int,
        wanted: bool,
    ) -> torch.Tensor:
        """Sum the cross entropy over all chunks; keep its gradients if they are `wanted`."""
        share = head.ranks.share(head.vocabulary)
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        gradients = _Gradients(head, trains_weight=trains_weight, trains_bias=trains_bias) if wanted else None
        total = at_least_fp32(hidden.new_zeros(()))
        room: torch.Tensor | None = None
        for part, logits in head.chunks():
            if room is None:
                room = at_least_fp32(logits)
            found = softmax_of_share(
                logits, targets[part], ignored, head.ranks, share, room=room[: len(logits)]
            )
            total += found.losses.sum()
            if gradients is not None:
                gradients.add(part, logits, found.gradient_in_place())
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = (None if one is None else one * gradient for one in ctx.saved_tensors)
        return (*scaled, None, None, None, None)
