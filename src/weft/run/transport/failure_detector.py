"""`FailureDetector`: tells every rank when the process of another one has ended without a farewell.

Each rank holds a TCP connection to rank 0. The kernel closes it when the process ends, also by SIGKILL. Rank
0 then tells all others. A process that is stopped, or that computes for long, keeps its connection. So no
slow rank is taken for a dead one, as it would be by a limit for heartbeats. This works under every launcher.
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

# The word of rank 0: the rank that is gone, or the farewell.
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
        peers = range(1, ranks) if rank == 0 else (0,)
        self._leads, self._tell, self._left = rank == 0, tell, False
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
                for ready, _ in there.select():
                    word = _word_from(ready.fileobj, ready.data)  # type: ignore[arg-type]
                    if self._left:
                        return
                    if word != _FAREWELL:
                        self._tell_all(word)
                        return
                    there.unregister(ready.fileobj)

    def _tell_all(self, gone: int) -> None:
        for line in self._lines.values() if self._leads else ():
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
