"""Files of nodes whose run directories are apart: checkpoints that they complete, and copies between them.

Each directory has the files of its own ranks, and the manifest of all. Before a load, the first rank of each
directory receives what its own lacks. So every rank reads a whole checkpoint, under any plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import RunError
from weft.files import flush, replacing
from weft.run.launch.failures import disk_problem
from weft.run.launch.nodes import JobNodes
from weft.training.checkpoint.manifest import (
    MANIFEST,
    digest_of,
    generation_path,
    generations,
    verify_part,
)
from weft.training.coordination.agreement import gather, meeting_peers, together

_CHUNK_BYTES = 1 << 22
# The name of a file, the rank that has it, and the rank that receives it.
Copy = tuple[str, int, int]


def completed_newest(
    directory: Path,
    nodes: JobNodes,
    group: dist.ProcessGroup | None,
    meet: Callable[[], None],
    progress: Callable[[], None],
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole among all directories, and one line per newer one skipped.

    Every rank calls it. Afterwards each directory has all its files.

    Raises:
        RunError: on every rank, if there are checkpoints and none is whole, or a copy fails.
    """
    skipped: list[str] = []
    with together(group, meet):
        own = [step for step, _ in generations(directory)] if nodes.leads_folder else []
    for step in sorted({step for steps in gather(own, group) for step in steps}, reverse=True):
        path = generation_path(directory, step)
        with together(group, meet):
            part = _part(path, progress) if nodes.leads_folder else {}
        parts = {rank: one for rank, one in enumerate(gather(part, group)) if one}
        problem = _problem(path, parts)
        if problem is None:
            copy_files(path, _missing(parts, nodes), nodes.rank, group, meet, progress)
            return path, skipped
        skipped.append(problem)
    if skipped:
        raise RunError(f"no checkpoint can be resumed: {'; '.join(skipped)}")
    return None, []


def _part(path: Path, progress: Callable[[], None]) -> dict[str, Any]:
    """Return the files that a directory has of a checkpoint, those of all, and a digest of the manifest."""
    if not path.exists():
        return {}
    try:
        names, expected = verify_part(path, lambda _: progress())
        digest = digest_of(path / MANIFEST)
    except (RunError, OSError) as error:
        return {"problem": str(error)}
    return {"names": names, "expected": sorted(expected), "manifest": digest}


def _problem(path: Path, parts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return why the parts of all directories, by their first ranks, make no whole checkpoint."""
    for rank, one in parts.items():
        if "problem" in one:
            return f"rank {rank}: {one['problem']}"
    if len({one["manifest"] for one in parts.values()}) > 1:
        return f"{path}: directories have other manifests: those of ranks {', '.join(map(str, parts))}"
    first = next(iter(parts.values()))
    held = {name for one in parts.values() for name in one["names"]}
    missing = [name for name in first["expected"] if name not in held]
    return f"{path}: no directory has {', '.join(missing)}" if missing else None


def _missing(parts: Mapping[int, Mapping[str, Any]], nodes: JobNodes) -> list[Copy]:
    """Return the copies that complete every directory; its manifest comes last."""
    writer = min(parts)
    holder = {name: rank for rank in sorted(parts, reverse=True) for name in parts[rank]["names"]}
    copies: list[Copy] = []
    for leader in nodes.folder_leaders:
        held = parts.get(leader)
        names = [name for name in holder if held is None or name not in held["names"]]
        copies += [(name, holder[name], leader) for name in sorted(names)]
        if held is None:
            copies.append((MANIFEST, writer, leader))
    return copies


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
    for name, source, target in copies:
        try:
            if rank == source:
                _send(folder / name, target, group, progress)
            elif rank == target:
                _receive(folder / name, source, group, progress)
        except OSError as error:
            problem = problem or disk_problem(rank, error)
    with together(group, meet):
        if problem:
            raise RunError(problem)


def _send(path: Path, target: int, group: dist.ProcessGroup | None, progress: Callable[[], None]) -> None:
    """Send a file's size, its content and its SHA-256; one that cannot be read has the size -1."""
    try:
        file, size = open(path, "rb"), path.stat().st_size  # noqa: SIM115
    except OSError:
        _send_number(-1, target, group)
        raise
    digest, problem = hashlib.sha256(), None
    with file:
        _send_number(size, target, group)
        for length in _chunks(size):
            content = b""
            try:
                content = file.read(length)
            except OSError as error:
                problem = error
            digest.update(content)
            # The receiver waits for as many bytes, and another digest tells it.
            _send_bytes(content.ljust(length, b"\0"), target, group)
            progress()
    _send_bytes(digest.digest(), target, group)
    if problem is not None:
        raise problem


def _receive(path: Path, source: int, group: dist.ProcessGroup | None, progress: Callable[[], None]) -> None:
    """Receive a file; take all of it in, also if the disk is full, as the sender waits."""
    size = torch.zeros(1, dtype=torch.int64)
    with meeting_peers():
        dist.recv(size, source, group)
    if int(size) < 0:
        return  # the sender tells why
    incoming, own = _Incoming(int(size), source, group, progress), hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            with open(unfinished, "wb") as file:
                for chunk in incoming.chunks:
                    own.update(chunk)
                    file.write(chunk)
            flush(unfinished)
            if own.digest() != incoming.digest:
                raise OSError(None, f"has changed on its way from rank {source}", str(path))
    finally:
        for _ in incoming.chunks:
            pass


class _Incoming:
    """The content of a file on its way, in chunks; its digest is there when they have been taken."""

    def __init__(
        self, size: int, source: int, group: dist.ProcessGroup | None, progress: Callable[[], None]
    ) -> None:
        self.digest = b""
        self.chunks = self._taken(size, source, group, progress)

    def _taken(
        self, size: int, source: int, group: dist.ProcessGroup | None, progress: Callable[[], None]
    ) -> Iterator[bytes]:
        for length in _chunks(size):
            yield self._next(length, source, group)
            progress()
        self.digest = self._next(hashlib.sha256().digest_size, source, group)

    @staticmethod
    def _next(length: int, source: int, group: dist.ProcessGroup | None) -> bytes:
        chunk = torch.zeros(length, dtype=torch.uint8)
        with meeting_peers():
            dist.recv(chunk, source, group)
        return chunk.numpy().tobytes()


def _chunks(size: int) -> Iterator[int]:
    for start in range(0, size, _CHUNK_BYTES):
        yield min(_CHUNK_BYTES, size - start)


def _send_bytes(content: bytes, target: int, group: dist.ProcessGroup | None) -> None:
    with meeting_peers():
        dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), target, group)


def _send_number(number: int, target: int, group: dist.ProcessGroup | None) -> None:
    with meeting_peers():
        dist.send(torch.tensor([number]), target, group)
