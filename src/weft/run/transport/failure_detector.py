"""`FailureDetector`: tells every rank when the process of another one has ended without a farewell.

Each rank holds a TCP connection to rank 0 and one to its deputy, rank 1. The kernel closes both when the
process ends, also by SIGKILL. Those two then tell all others, so one of them may be stopped itself. A process
that is stopped, or that computes for long, keeps its connections. So no slow rank is taken for a dead one, as
it would be by a limit for heartbeats. This works under every launcher.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

import torch.distributed as dist

from weft.run.transport.connections import connect, receive_exactly

# The ranks that tell: rank 0 and its deputy.
TELLERS = 2
# Their word: the rank that is gone, or the farewell.
_WORD = struct.Struct("!i")
_FAREWELL = -1


class FailureDetector:
    """One rank's detector; every rank of the job makes one.

    Args:
        tell: takes the rank that is gone; called once, in a thread of the detector. Its object may end.
        group: all ranks of the job, over gloo.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        InputError, RunError: as `weft.run.transport.connections.connect`.
    """

    def __init__(
        self, tell: WeakMethod[Callable[[int], None]], group: dist.ProcessGroup, timeout_s: float
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._tells_others, self._tell, self._left = rank < TELLERS, tell, False
        peers = set(range(ranks if self._tells_others else TELLERS)) - {rank}
        lines = connect(peers, ["presence"], timeout_s, group)
        self._lines = {peer: line for (peer, _), line in lines.items()}
        name = "weft-failure-detector"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def close(self, *, farewell: bool = True) -> None:
        """Leave the job; without a farewell the other ranks are told that this one is gone."""
        self._left = True
        for line in self._lines.values():
            with suppress(OSError):
                if farewell:
                    line.sendall(_WORD.pack(_FAREWELL))
                # Wakes the thread, too.
                line.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for line in self._lines.values():
            line.close()

    def _watch(self) -> None:
        """Tell of the first rank that is gone, and end then or when all have left."""
        with selectors.DefaultSelector() as there:
            for peer, line in self._lines.items():
                there.register(line, selectors.EVENT_READ, peer)
            while there.get_map():
                words = {one.data: _word_from(self._lines[one.data], one.data) for one, _ in there.select()}
                if self._left:
                    return
                # Ranks that were told have ended since: what one tells is before the ends that are seen.
                gone = sorted((peer == word, word) for peer, word in words.items() if word != _FAREWELL)
                if gone:
                    self._tell_all(gone[0][1])
                    return
                for peer in words:
                    there.unregister(self._lines[peer])

    def _tell_all(self, gone: int) -> None:
        for line in self._lines.values() if self._tells_others else ():
            # That rank may be gone, too.
            with suppress(OSError):
                line.sendall(_WORD.pack(gone))
        if (tell := self._tell()) is not None:
            tell(gone)


def _word_from(line: socket.socket, peer: int) -> int:
    """Return the word that has come; a connection that ends without any tells that its rank is gone."""
    try:
        (word,) = _WORD.unpack(receive_exactly(line, _WORD.size))
    except OSError:
        return peer
    return int(word)
