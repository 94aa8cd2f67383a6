"""Copies of files between the disks of ranks: whole files, or spans of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.errors import RunError
from weft.files import flush, replacing
from weft.run.launch.failures import disk_problem
from weft.training.coordination.agreement import meeting_peers, together

_CHUNK_BYTES = 1 << 22
# The first byte, and the number of bytes.
Span = tuple[int, int]


class Copy(NamedTuple):
    """A file, the rank that has it, and the rank that receives it.

    `spans` are the parts of a file that the receiver has with holes; None: the whole file.
    """

    name: str
    source: int
    target: int
    spans: tuple[Span, ...] | None = None


def copy_files(
    folder: Path,
    copies: Sequence[Copy],
    rank: int,
    group: dist.ProcessGroup | None,
    meet: Callable[[], None] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Copy files of a folder between the ranks' disks, under the same names; every rank calls it.

    Raises:
        RunError: on every rank, if a file cannot be read or written, or changes on the way.
    """
    problem = ""
    for one in copies:
        try:
            if rank == one.source:
                _send(folder / one.name, one, group, progress)
            elif rank == one.target:
                _receive(folder / one.name, one, group, progress)
        except OSError as error:
            problem = problem or disk_problem(rank, error)
    with together(group, meet):
        if problem:
            raise RunError(problem)


def _send(path: Path, copy: Copy, group: dist.ProcessGroup | None, progress: Callable[[], None]) -> None:
    """Send a file's size, its content and its SHA-256; one that cannot be read has the size -1."""
    try:
        file, size = open(path, "rb"), path.stat().st_size  # noqa: SIM115
    except OSError:
        _send_number(-1, copy.target, group)
        raise
    digest, problem = hashlib.sha256(), None
    with file:
        _send_number(size, copy.target, group)
        for start, length in _chunks(copy, size):
            content = b""
            try:
                file.seek(start)
                content = file.read(length)
            except OSError as error:
                problem = error
            digest.update(content)
            # The receiver waits for as many bytes, and another digest tells it.
            _send_bytes(content.ljust(length, b"\0"), copy.target, group)
            progress()
    _send_bytes(digest.digest(), copy.target, group)
    if problem is not None:
        raise problem


def _receive(path: Path, copy: Copy, group: dist.ProcessGroup | None, progress: Callable[[], None]) -> None:
    """Receive a file; take all of it in, also if the disk is full, as the sender waits."""
    size = torch.zeros(1, dtype=torch.int64)
    with meeting_peers():
        dist.recv(size, copy.source, group)
    if int(size) < 0:
        return  # the sender tells why
    incoming, own = _Incoming(copy, int(size), group, progress), hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) if copy.spans is None else nullcontext(path) as written:
            with open(written, "wb" if copy.spans is None else "r+b") as file:
                for start, chunk in incoming.chunks:
                    own.update(chunk)
                    file.seek(start)
                    file.write(chunk)
            if copy.spans is None:
                flush(written)
            if own.digest() != incoming.digest:
                raise OSError(None, f"has changed on its way from rank {copy.source}", str(path))
    finally:
        for _ in incoming.chunks:
            pass


class _Incoming:
    """The content of a file on its way, in chunks; its digest is there when they have been taken."""

    def __init__(
        self, copy: Copy, size: int, group: dist.ProcessGroup | None, progress: Callable[[], None]
    ) -> None:
        self.digest = b""
        self.chunks = self._taken(copy, size, group, progress)

    def _taken(
        self, copy: Copy, size: int, group: dist.ProcessGroup | None, progress: Callable[[], None]
    ) -> Iterator[tuple[int, bytes]]:
        for start, length in _chunks(copy, size):
            yield start, self._next(length, copy.source, group)
            progress()
        self.digest = self._next(hashlib.sha256().digest_size, copy.source, group)

    @staticmethod
    def _next(length: int, source: int, group: dist.ProcessGroup | None) -> bytes:
        chunk = torch.zeros(length, dtype=torch.uint8)
        with meeting_peers():
            dist.recv(chunk, source, group)
        return chunk.numpy().tobytes()


def _chunks(copy: Copy, size: int) -> Iterator[Span]:
    for first, length in ((0, size),) if copy.spans is None else copy.spans:
        for start in range(first, first + length, _CHUNK_BYTES):
            yield start, min(_CHUNK_BYTES, first + length - start)


def _send_bytes(content: bytes, target: int, group: dist.ProcessGroup | None) -> None:
    with meeting_peers():
        dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), target, group)


def _send_number(number: int, target: int, group: dist.ProcessGroup | None) -> None:
    with meeting_peers():
        dist.send(torch.tensor([number]), target, group)
