"""Packed samples: several documents in one sample, and attention inside each of them.

Tokens attend to the tokens before them in their own document alone, and positions begin anew in each of them.
So a packed sample has the outputs of its documents one by one (Krell et al., arXiv 2107.02027). Attention
runs document by document: it computes no scores between documents, and keeps no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from weft.run.accelerator import to_device

# For every sample, the tokens of its documents in order; they add up to the tokens of the sample.
Lengths = Sequence[Sequence[int]]
_HEADS, _TOKENS = 1, 2


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one micro-batch.

    Attributes:
        lengths: see `Lengths`.
        positions: of every token in its document, int64 of shape (samples, tokens).
    """

    lengths: Lengths
    positions: torch.Tensor

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device) -> Self:
        rows = [torch.cat([torch.arange(length) for length in sample]) for sample in lengths]
        return cls(lengths, to_device(torch.stack(rows), device))

    def attend(
        self,
        function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        *values: torch.Tensor,
    ) -> torch.Tensor:
        """Return (samples, tokens, heads, head size): the attention of a function inside each document.

        `values` are queries, keys and values, (samples, heads, tokens, head size). The function takes them of
        one document, and returns (1, tokens, heads, head size).
        """
        samples = zip(*(value.split(1) for value in values), strict=True)
        attended = (
            torch.cat([function(*document) for document in _split(sample, lengths)], 1)
            for sample, lengths in zip(samples, self.lengths, strict=True)
        )
        return torch.cat(list(attended))

    def each(self, function: Callable[[torch.Tensor], torch.Tensor], stream: torch.Tensor) -> torch.Tensor:
        """Return the results of a function of each document's part of a stream, (samples, tokens, hidden)."""
        samples = (
            torch.cat([function(document) for document in sample.split(list(lengths), 1)], 1)
            for sample, lengths in zip(stream.split(1), self.lengths, strict=True)
        )
        return torch.cat(list(samples))

    def mask(self, window: int, like: torch.Tensor) -> torch.Tensor:
        """Return the summand of scores, (samples, 1, tokens, tokens), for kernels that store them.

        Args:
            window: the tokens that each one attends to, itself included; 0 for all before it.
            like: a tensor with the precision and the device of the mask.
        """
        numbers = (self.positions == 0).cumsum(1)
        seen = (numbers.unsqueeze(2) == numbers.unsqueeze(1)).tril()
        if window:
            seen = seen.triu(1 - window)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(~seen, torch.finfo(like.dtype).min).unsqueeze(_HEADS)


def tell_documents(stage: nn.Module, documents: Documents | None) -> None:
    """Give a stage the documents of the micro-batch whose forward pass begins."""
    if documents is not None:
        stage.documents = documents  # type: ignore[assignment]  # a module takes any attribute


def part_of(lengths: Lengths, splits: int, part: int) -> Lengths:
    """Return the lengths of one part of a micro-batch, split as `torch.tensor_split` does."""
    small, larger = divmod(len(lengths), splits)
    first = part * small + min(part, larger)
    return lengths[first : first + small + (part < larger)]


def _split(values: Sequence[torch.Tensor], lengths: Sequence[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the values of each document."""
    return zip(*(value.split(list(lengths), _TOKENS) for value in values), strict=True)
