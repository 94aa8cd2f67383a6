"""`TensorRanks`: the ranks that divide a stage's layers among them, and what they exchange inside a layer.

Products that are divided by columns are followed by products divided by rows, so that a pair of them needs
one exchange at its entry and one at its exit (Shoeybi et al., Megatron-LM, arXiv 1909.08053). Where the ranks
divide the sequence, too, each keeps its own tokens of everything between an exit and the next entry, which
is called the stream: the entry gathers the tokens, the exit adds the partial results up and scatters them
(Korthikanti et al., arXiv 2205.05198). Otherwise the entry does nothing and the exit adds up. Backward the
two change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.replica_ranks import ReplicaRanks

# Values are (samples, tokens, ...).
_TOKENS = 1


class TensorRanks(ReplicaRanks):
    """The ranks of one replica of a stage that divide its layers, seen from one of them.

    Args:
        place, size: which of how many it is.
        divides_sequence: whether each keeps its own tokens only, outside of the divided products; the number
            of tokens is a multiple of `size`.

    Attributes:
        elsewhere: whoever computes exchanges what enters and leaves by other means: between segments.
    """

    name = "tensor"

    def __init__(self, place: int = 0, size: int = 1, *, divides_sequence: bool = False) -> None:
        super().__init__(place, size)
        self.divides_sequence = divides_sequence and size > 1
        self.elsewhere = False

    def share(self, length: int, place: int | None = None) -> range:
        """Which of `length` columns a rank holds, by default this one; shares differ by one at most."""
        place = self.place if place is None else place
        return range(length * place // self.size, length * (place + 1) // self.size)

    def enter(self, stream: torch.Tensor) -> torch.Tensor:
        """Return all tokens of the stream, for products that are divided by columns: (b, s, ...)."""
        if self.size == 1 or self.elsewhere:
            return stream
        entered: torch.Tensor = _Enter.apply(stream, self)
        return entered

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the stream out of the partial sums (b, s, ...) of products that are divided by rows."""
        if self.size == 1 or self.elsewhere:
            return partial
        left: torch.Tensor = _Leave.apply(partial, self)
        return left

    @contextmanager
    def exchanging_elsewhere(self) -> Iterator[None]:
        """Yield a block in which what enters is there already, and what leaves is left as it is."""
        self.elsewhere = True
        try:
            yield
        finally:
            self.elsewhere = False

    def exchanges(self, *, enters: bool, backward: bool) -> bool:
        """Return whether a pass exchanges anything where it comes over the border of a region."""
        return self.size > 1 and (self.divides_sequence or enters == backward)

    def exchange(self, value: torch.Tensor, *, enters: bool, backward: bool) -> torch.Tensor:
        """What a pass exchanges where it comes over the border of a region of divided products."""
        if not self.divides_sequence:
            return self.add_up(value)
        return self.gather_tokens(value) if enters != backward else self.scatter_tokens(value)

    def whole_stream(self, stream: torch.Tensor) -> torch.Tensor:
        """Return all tokens of the stream, for what every rank computes in full."""
        whole: torch.Tensor = _Whole.apply(stream, self) if self.divides_sequence else stream
        return whole

    def own_tokens(self, whole: torch.Tensor, dimension: int = _TOKENS) -> torch.Tensor:
        """What the stream has on this rank of a value with all tokens, which every rank computes in full."""
        return whole.chunk(self.size, dimension)[self.place] if self.divides_sequence else whole

    def stream_tokens(self, sequence: int) -> int:
        """Return tokens of the stream on one rank."""
        return sequence // self.size if self.divides_sequence else sequence

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of all ranks' values of one shape."""
        return self.gather(value).amax(0)

    def gather_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """(b, s / size, ...) of every rank to (b, s, ...)."""
        return self.gather(stream).movedim(0, _TOKENS).flatten(_TOKENS, _TOKENS + 1)

    def scatter_tokens(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the own tokens (b, s / size, ...) of the sum of all ranks' (b, s, ...)."""
        return self.scatter_sum(partial.unflatten(_TOKENS, (self.size, -1)).movedim(_TOKENS, 0))


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
    """What follows is the same on every rank, and so is its gradient: each takes the part of its tokens."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gather_tokens(stream)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own_tokens(gradient), None
