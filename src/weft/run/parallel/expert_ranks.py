"""`ExpertRanks`: the ranks that divide the experts of every mixture, and the samples of every micro-batch.

Every rank has all weights but those of experts, and the experts of its share. Rows of tokens go to the ranks
of their experts and come back (Lepikhin et al., GShard, arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weft.run.parallel.function import Function
from weft.run.parallel.permutation import inverse, permuted
from weft.run.parallel.row_exchange import Sent, exchanged
from weft.run.parallel.token_ranks import TokenRanks

_SAMPLES = 0

_Way = Callable[[torch.Tensor], torch.Tensor]


class ExpertRanks(TokenRanks):
    """The ranks of one replica of a stage that divide experts and samples, seen from one of them.

    Attributes:
        per_node: neighbours on each node, which exchange rows first; 1: all exchange at once.
        elsewhere: True while the caller exchanges the rows of mixtures itself, between segments.
        left: these rows, as the mixtures leave them.
    """

    name = "expert"

    def __init__(self, place: int = 0, size: int = 1) -> None:
        super().__init__(place, size)
        self.per_node = 1
        self.elsewhere = False
        self.left: list[Any] = []

    def own_tokens(self, whole: torch.Tensor, dimension: int = 1, place: int | None = None) -> torch.Tensor:
        """Return the samples of a rank, by default this one; `dimension` is of no matter."""
        return whole.chunk(self.size, _SAMPLES)[self.place if place is None else place]

    def joined(self, shares: torch.Tensor, dimension: int = 1) -> torch.Tensor:
        return shares.flatten(0, 1)

    def route(self, counts: torch.Tensor) -> Dispatch:
        """Return the way of rows, sorted by expert, to the ranks of their experts; the ranks gather counts.

        Args:
            counts: rows of each expert, (experts,).
        """
        of_all = self.gather(counts)
        own = of_all.chunk(self.size, 1)[self.place]
        expert = torch.arange(own.shape[1], device=own.device).repeat(self.size)
        order = torch.argsort(expert.repeat_interleave(own.flatten()), stable=True)
        # The host needs the sizes of all sends.
        sent = of_all.view(self.size, self.size, -1).sum(2).tolist()
        return Dispatch(self, sent, own.sum(0), order, inverse(order))

    @contextmanager
    def exchanging_elsewhere(self) -> Iterator[None]:
        """Leave the rows of mixtures to the caller within this block, in `left`."""
        self.elsewhere = True
        try:
            yield
        finally:
            self.elsewhere = False
            self.left.clear()


class Dispatch(NamedTuple):
    """The way of a micro-batch's rows to their experts and back.

    Attributes:
        sent: rows from each rank to each.
        counts: rows of all ranks for each of this rank's experts, (own experts,).
        order, place: positions of received rows in the order of experts, and the inverse, (received,).
    """

    ranks: ExpertRanks
    sent: Sent
    counts: torch.Tensor
    order: torch.Tensor
    place: torch.Tensor

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that all ranks have for this rank's experts, sorted by expert and then by sender.

        `rows` (pairs, hidden) are sorted by expert.
        """
        received: torch.Tensor = _Exchange.apply(rows, self.send, self.send_back)
        return self.by_expert(received)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results of this rank's own rows, in their first order."""
        returned: torch.Tensor = _Exchange.apply(self.by_sender(rows), self.send_back, self.send)
        return returned

    def by_expert(self, received: torch.Tensor) -> torch.Tensor:
        """Return received rows, which are sorted by sender, sorted by expert."""
        return permuted(received, self.order, self.place)

    def by_sender(self, rows: torch.Tensor) -> torch.Tensor:
        return permuted(rows, self.place, self.order)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that all ranks send to this one; no gradient follows."""
        return self._exchanged(rows, self.sent)

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's own rows from the ranks of their experts; no gradient follows."""
        return self._exchanged(rows, [*zip(*self.sent, strict=True)])

    def _exchanged(self, rows: torch.Tensor, sent: Sent) -> torch.Tensor:
        with self.ranks.meeting():
            return exchanged(rows, sent, self.ranks.group, self.ranks.per_node)


class _Exchange(Function):
    """Rows to other ranks one way; their gradients come the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: _Way, back: _Way) -> torch.Tensor:
        ctx.back = back
        return way(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None
