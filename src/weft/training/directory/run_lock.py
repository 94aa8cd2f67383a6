"""One run per run directory: a lock that the system takes back when its holder ends, even by a kill.

The launcher holds it while its workers run, and rank 0 where `torchrun` has started the workers. It is of
`fcntl.lockf` and not of `flock`: NFS passes it to its server, so that it counts between hosts, and no child
inherits it, so that none outlives its holder with it. In return it does not keep apart the threads of one
process.

No torch here: the launcher uses it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import InputError, Violation

LOCK_FILE = "run.lock"


@contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """A block that no other process may be in for the same run directory, which is made if it is missing.

    Nothing but the lock's own file is touched. Where the file system has no locks a line on stderr says so.

    Raises:
        InputError: naming host and process of the holder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, run_dir)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        # Other hosts see on NFS what has reached the server.
        os.fsync(descriptor)
        yield
    finally:
        # The file stays: who removes it may remove the one that somebody else has just locked.
        os.close(descriptor)


def _lock(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        problem = f"is being trained by {holder}; wait for its end, or stop it"
        raise InputError(Violation(str(run_dir), problem)) from None
    except OSError as error:
        print(
            f"warning: {run_dir / LOCK_FILE}: the file system does not lock it ({error.strerror}); "
            "a second run in the same directory would not be refused",
            file=sys.stderr,
        )
