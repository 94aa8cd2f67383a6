"""`TensorRanks`: the ranks that divide a stage's layers among them, and what they exchange inside a layer.

Products that are divided by columns are followed by products divided by rows, so that a pair of them needs
one exchange at its entry and one at its exit (Shoeybi et al., Megatron-LM, arXiv 1909.08053). Where the ranks
divide the sequence, too, each keeps its own tokens of everything between an exit and the next entry, which
is called the stream: the entry gathers the tokens, the exit adds the partial results up and scatters them
(Korthikanti et al., arXiv 2205.05198). Otherwise the entry does nothing and the exit adds up. Backward the
two change places.

Sums are in the order of the ranks, so that repetitions have the same bits and replicated values stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft.run.failures import PeerLostError
from weft.run.work_queue import first_line
from weft.sync.collectives import all_gather, reduce_scatter

# Values are (samples, tokens, ...).
_TOKENS = 1


class TensorRanks:
    """The ranks of one replica of a stage, seen from one of them.

    Args:
        place, size: which of how many it is.
        divides_sequence: whether each keeps its own tokens only, outside of the divided products; the number
            of tokens is a multiple of `size`.
    """

    def __init__(self, place: int = 0, size: int = 1, *, divides_sequence: bool = False) -> None:
        self.place = place
        self.size = size
        self.divides_sequence = divides_sequence and size > 1
        self._group: dist.ProcessGroup | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Exchange over this group from now on; its ranks are in the order of their places."""
        self._group = group

    def disconnect(self) -> None:
        self._group = None

    @property
    def group(self) -> dist.ProcessGroup:
        assert self._group is not None, "a runtime connects the stages that it is given"
        return self._group

    def share(self, length: int, place: int | None = None) -> range:
        """Which of `length` columns a rank holds, by default this one; shares differ by one at most."""
        place = self.place if place is None else place
        return range(length * place // self.size, length * (place + 1) // self.size)

    def enter(self, stream: torch.Tensor) -> torch.Tensor:
        """All tokens of the stream, for products that are divided by columns: (b, s, ...)."""
        entered: torch.Tensor = _Enter.apply(stream, self) if self.size > 1 else stream
        return entered

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The stream out of the partial sums (b, s, ...) of products that are divided by rows."""
        left: torch.Tensor = _Leave.apply(partial, self) if self.size > 1 else partial
        return left

    def whole_stream(self, stream: torch.Tensor) -> torch.Tensor:
        """All tokens of the stream, for what every rank computes in full."""
        whole: torch.Tensor = _Whole.apply(stream, self) if self.divides_sequence else stream
        return whole

    def own_tokens(self, whole: torch.Tensor, dimension: int = _TOKENS) -> torch.Tensor:
        """What the stream has on this rank of a value with all tokens, which every rank computes in full."""
        return whole.chunk(self.size, dimension)[self.place] if self.divides_sequence else whole

    def stream_tokens(self, sequence: int) -> int:
        """Tokens of the stream on one rank."""
        return sequence // self.size if self.divides_sequence else sequence

    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values of one shape, as a new tensor."""
        return summed(value, self.group)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """All ranks' values of one shape, one after the other: (size, ...)."""
        share = _on_host(value)
        found = torch.empty((self.size, *share.shape), dtype=share.dtype)
        with _meeting():
            all_gather(found.view(-1), share.view(-1), self.group)
        return found.to(value.device)

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum of all ranks' values of one shape."""
        return self.gather(value).amax(0)

    def gather_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """(b, s / size, ...) of every rank to (b, s, ...)."""
        return self.gather(stream).movedim(0, _TOKENS).flatten(_TOKENS, _TOKENS + 1)

    def scatter_tokens(self, partial: torch.Tensor) -> torch.Tensor:
        """The own tokens (b, s / size, ...) of the sum of all ranks' (b, s, ...)."""
        shares = _on_host(partial.unflatten(_TOKENS, (self.size, -1)).movedim(_TOKENS, 0))
        with _meeting():
            own = reduce_scatter(shares.view(-1), self.group)
        return own.view(shares.shape[1:]).to(partial.device)


def summed(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over a group of values of one shape, in the order of the ranks, as a new tensor."""
    ranks = dist.get_world_size(group)
    flat = _on_host(value).view(-1)
    total = flat.new_zeros(-(-len(flat) // ranks) * ranks)
    total[: len(flat)] = flat
    with _meeting():
        if ranks == 2:
            # The sum of two numbers does not depend on their order.
            dist.all_reduce(total, group=group)
        else:
            all_gather(total, reduce_scatter(total, group), group)
    return total[: len(flat)].view(value.shape).to(value.device)


@contextmanager
def _meeting() -> Iterator[None]:
    """An exchange; torch's errors in it mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"lost another tensor rank: {first_line(error)}") from error


def _on_host(value: torch.Tensor) -> torch.Tensor:
    """Contiguous in host memory, which is what gloo works on."""
    return value.detach().to("cpu").contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gather_tokens(stream) if ranks.divides_sequence else stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: TensorRanks = ctx.ranks
        exchange = ranks.scatter_tokens if ranks.divides_sequence else ranks.add_up
        return exchange(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        exchange = ranks.scatter_tokens if ranks.divides_sequence else ranks.add_up
        return exchange(partial)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: TensorRanks = ctx.ranks
        return ranks.gather_tokens(gradient) if ranks.divides_sequence else gradient, None


class _Whole(torch.autograd.Function):
    """What follows is the same on every rank, and so is its gradient: each takes the part of its tokens."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gather_tokens(stream)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own_tokens(gradient), None
