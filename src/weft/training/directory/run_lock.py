"""The lock of a run directory, for one run at a time.

The launcher holds it while its workers run; rank 0 holds it if `torchrun` has started the workers. The system
frees it when its holder ends, even by a kill. It is a lock of `fcntl.lockf` and not of `flock`. NFS passes
such a lock to its server, so it works between hosts. No child inherits it, so no child keeps it longer than
its holder. It does not exclude threads of one process.

The launcher uses it; it does not import torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import InputError, Violation

LOCK_FILE = "run.lock"


@contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory during the block; create the directory if it is missing.

    Only the lock's own file changes. If the file system has no locks, it prints a warning on stderr.

    Raises:
        InputError: if another process holds it, with the process and host.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, run_dir)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        # On NFS, other hosts see only the bytes that have reached the server.
        os.fsync(descriptor)
        yield
    finally:
        # The file stays: another process may have locked it just before a removal.
        os.close(descriptor)


def is_running(run_dir: Path) -> bool:
    """Return True if another process holds the lock of a run directory; it takes no lock itself."""
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Whole file, from its beginning: a struct flock of this platform's C.
        asked = struct.pack("hhllhh", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0, 0)
        found: int = struct.unpack("hhllhh", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
        return found != fcntl.F_UNLCK
    except OSError:
        return False  # a file system without locks
    finally:
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
