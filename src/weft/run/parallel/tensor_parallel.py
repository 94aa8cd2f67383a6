"""`TensorRanks`: the ranks that divide a stage's layers, and their exchanges inside a layer.

A product divided by columns precedes a product divided by rows. So the pair needs one exchange at its entry
and one at its exit (Shoeybi et al., Megatron-LM, arXiv 1909.08053). The stream is everything between an exit
and the next entry. If the ranks also divide the sequence, each keeps its own tokens of the stream. The entry
gathers the tokens; the exit adds up the partial results and scatters them (Korthikanti et al., arXiv
2205.05198). Otherwise the entry does nothing and the exit adds up. Backward the two change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.replica_ranks import ReplicaRanks

# The axis of tokens: values are (samples, tokens, ...).
TOKENS = 1


class TensorRanks(ReplicaRanks):
    """The ranks of one replica of a stage that divide its layers, seen from one of them.

    Args:
        place, size: this rank's place among `size` ranks.
        divides_sequence: True if each rank keeps only its own tokens outside of the divided products; the
            number of tokens is a multiple of `size`.

    Attributes:
        elsewhere: True while the caller exchanges the values itself, between segments.
    """

    name = "tensor"

    def __init__(self, place: int = 0, size: int = 1, *, divides_sequence: bool = False) -> None:
        super().__init__(place, size)
        self.divides_sequence = divides_sequence and size > 1
        self.elsewhere = False

    def enter(self, stream: torch.Tensor) -> torch.Tensor:
        """Return all tokens of the stream, for products that are divided by columns: (b, s, ...)."""
        if self.size == 1 or self.elsewhere:
            return stream
        entered: torch.Tensor = _Enter.apply(stream, self)
        return entered

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the stream, from the partial sums (b, s, ...) of products that are divided by rows."""
        if self.size == 1 or self.elsewhere:
            return partial
        left: torch.Tensor = _Leave.apply(partial, self)
        return left

    @contextmanager
    def exchanging_elsewhere(self) -> Iterator[None]:
        """Exchange nothing within this block: the caller gathers the input and adds up the output."""
        self.elsewhere = True
        try:
            yield
        finally:
            self.elsewhere = False

    def exchanges(self, *, enters: bool, backward: bool) -> bool:
        """Return True if a pass exchanges a value at this border of a region."""
        return self.size > 1 and (self.divides_sequence or enters == backward)

    def exchange(self, value: torch.Tensor, *, enters: bool, backward: bool) -> torch.Tensor:
        """Return the exchanged value of a pass at a border of a region of divided products."""
        if not self.divides_sequence:
            return self.add_up(value)
        return self.gather_tokens(value) if enters != backward else self.scatter_tokens(value)

    def whole_stream(self, stream: torch.Tensor) -> torch.Tensor:
        """Return all tokens of the stream, for computations that every rank repeats."""
        whole: torch.Tensor = _Whole.apply(stream, self) if self.divides_sequence else stream
        return whole

    def own_tokens(self, whole: torch.Tensor, dimension: int = TOKENS) -> torch.Tensor:
        """Return this rank's part of the stream, from a value with all tokens that every rank computes."""
        return whole.chunk(self.size, dimension)[self.place] if self.divides_sequence else whole

    def stream_tokens(self, sequence: int) -> int:
        """Return the number of the stream's tokens on one rank."""
        return sequence // self.size if self.divides_sequence else sequence

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of all ranks' values of one shape."""
        return self.gather(value).amax(0)

    def gather_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """Gather (b, s / size, ...) of every rank to (b, s, ...)."""
        return self.gather(stream).movedim(0, TOKENS).flatten(TOKENS, TOKENS + 1)

    def scatter_tokens(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the own tokens (b, s / size, ...) of the sum of all ranks' (b, s, ...)."""
        return self.scatter_sum(partial.unflatten(TOKENS, (self.size, -1)).movedim(TOKENS, 0))


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gather_tokens(stream) if ranks.divides_sequence else stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: TensorRanks = ctx.ranks
        exchange = ranks.scatter_tokens if ranks.divides_sequence else ranks.add_up
        return exchange(gradient), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        exchange = ranks.scatter_tokens if ranks.divides_sequence else ranks.add_up
        return exchange(partial)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: TensorRanks = ctx.ranks
        return ranks.gather_tokens(gradient) if ranks.divides_sequence else gradient, None


class _Whole(Function):
    """A gather for equal computations on all ranks: as gradients are equal, each takes its tokens' part."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gather_tokens(stream)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own_tokens(gradient), None
