"""`Gone`: the rank of a job that is gone, which ends the communication of all others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.run.launch.failures import PeerLostError

# A connection to a lost rank may break before its name comes.
_NAME_S = 1.0


class Gone:
    """The first rank that has ended, once this rank learns it in any thread; `name_of` names a rank."""

    def __init__(self, name_of: Callable[[int], str] = "rank {}".format) -> None:
        self.rank: int | None = None
        self._name_of, self._known = name_of, threading.Event()

    def add(self, rank: int) -> None:
        self.rank = rank
        self._known.set()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let errors of this block name the gone rank, which is their cause.

        Raises:
            PeerLostError: if a rank is gone, even if the block succeeds: aborted kernels leave no result.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, PeerLostError):
                self._known.wait(_NAME_S)
            if self.rank is not None:
                raise PeerLostError(f"{error}; {self._name_of(self.rank)} is gone") from error
            raise
        if self.rank is not None:
            raise PeerLostError(f"{self._name_of(self.rank)} is gone")
