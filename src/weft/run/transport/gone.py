"""`Gone`: the ranks of a job that are gone, which end the communication of all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft.run.launch.failures import PeerLostError


class Gone:
    """The ranks that have ended, in the order in which this rank learned it; a thread may add to them."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()

    def add(self, ranks: Sequence[int]) -> None:
        self.ranks = (*self.ranks, *(rank for rank in ranks if rank not in self.ranks))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let errors of this block name the gone ranks, which are their cause.

        Raises:
            PeerLostError: if a rank is gone, even if the block succeeds: aborted kernels leave no result.
        """
        try:
            yield
        except Exception as error:
            if self.ranks:
                raise PeerLostError(f"{error}; {self._words}") from error
            raise
        if self.ranks:
            raise PeerLostError(self._words)

    @property
    def _words(self) -> str:
        many = len(self.ranks) > 1
        return f"rank{'s' * many} {', '.join(map(str, self.ranks))} {'are' if many else 'is'} gone"
