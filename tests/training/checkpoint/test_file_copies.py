"""Copies between the disks of ranks: whole files, spans of files, and disks that fail on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pool import WorkerPool

from weft.errors import RunError
from weft.training.checkpoint.file_copies import Copy, copy_files

pytestmark = pytest.mark.processes
RANKS = 3


def copied(rank: int, ranks: int, path: Path) -> str:
    own = path / str(rank)
    own.mkdir(exist_ok=True)
    copies = [Copy("sub/large", 0, 1), Copy("missing", 1, 2), Copy("empty", 2, 0)]
    try:
        copy_files(own, copies, rank, None)
    except RunError as error:
        return str(error)
    return ""


def test_a_file_that_cannot_be_read_ends_the_copies_of_all_and_leaves_nobody_waiting(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    for rank, name, content in ((0, "sub/large", bytes(range(250)) * 40_000), (2, "empty", b"")):
        (tmp_path / str(rank) / "sub").mkdir(parents=True)
        (tmp_path / str(rank) / name).write_bytes(content)
    told = set(worker_pool.run(copied, tmp_path, ranks=RANKS))
    assert told == {f"rank 1: {tmp_path / '1' / 'missing'}: No such file or directory"}
    assert (tmp_path / "1" / "sub" / "large").read_bytes() == (tmp_path / "0" / "sub" / "large").read_bytes()
    assert (tmp_path / "0" / "empty").read_bytes() == b""


def test_a_file_that_cannot_be_written_is_taken_in_to_its_end(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    for rank in range(RANKS):
        (tmp_path / str(rank) / "sub").mkdir(parents=True)
        for name in ("sub/large", "missing", "empty"):
            (tmp_path / str(rank) / name).write_bytes(bytes(5 << 20))
    shutil.rmtree(tmp_path / "1" / "sub")
    (tmp_path / "1" / "sub").write_text("no folder")
    told = set(worker_pool.run(copied, tmp_path, ranks=RANKS))
    assert told == {f"rank 1: {tmp_path / '1' / 'sub'}: File exists"}
    assert (tmp_path / "0" / "empty").stat().st_size == 5 << 20


def copied_spans(rank: int, ranks: int, path: Path) -> None:
    copy_files(path / str(rank), [Copy("large", 0, 1, ((1, 3), (5 << 20, 6 << 20)))], rank, None)


def test_spans_are_filled_in_and_the_rest_stays(worker_pool: WorkerPool, tmp_path: Path) -> None:
    content = bytes(range(1, 251)) * 50_000
    for rank, known in ((0, content), (1, bytes(len(content)))):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "large").write_bytes(known)
    worker_pool.run(copied_spans, tmp_path, ranks=2)
    expected = bytearray(len(content))
    for start, length in ((1, 3), (5 << 20, 6 << 20)):
        expected[start : start + length] = content[start : start + length]
    assert (tmp_path / "1" / "large").read_bytes() == expected
