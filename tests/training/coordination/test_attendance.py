"""Attendance: who does not come and does nothing is named, the same by all; who gets on is waited for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pool import RankError, WorkerPool

from weft.errors import RunError
from weft.training.coordination.attendance import Attendance

pytestmark = pytest.mark.processes

LIMIT_S = 1.0


def come(rank: int, ranks: int, meetings: int, report: Path, **how: int | tuple[int, ...]) -> str:
    """Ranks that `how` leaves out come at once to each meeting; what the last one says."""
    attendance = Attendance()
    for _ in range(meetings - 1):
        attendance.meet("here", "slept", LIMIT_S)
    if how.get("gone") == rank:
        os._exit(0)
    if rank in how.get("late", ()):
        time.sleep(2 * LIMIT_S)
    if rank in how.get("slow", ()):
        for _ in range(20):
            time.sleep(2 * LIMIT_S / 20)
            attendance.progress()
    text = ""
    try:
        attendance.meet("here", "slept", LIMIT_S)
        attendance.require_nobody_late()
        attendance.close()
    except RunError as error:
        text = f"{type(error).__name__}: {error}"
    report.write_text(text)
    return text


def late(rank: int, ranks: int, report: Path, *lates: int) -> str:
    return come(rank, ranks, 2, report / str(rank), late=lates)


def slow(rank: int, ranks: int, report: Path, *slows: int) -> str:
    return come(rank, ranks, 3, report / str(rank), slow=slows)


def gone(rank: int, ranks: int, report: Path) -> str:
    return come(rank, ranks, 2, report / str(rank), gone=1)


@pytest.mark.parametrize(("ranks", "missing"), [(1, ()), (2, (0,)), (3, (1, 2))])
def test_who_is_late_is_named_on_every_rank_and_who_gets_on_is_not(
    worker_pool: WorkerPool, tmp_path: Path, ranks: int, missing: tuple[int, ...]
) -> None:
    named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    line = f"LateRankError: here: {named} slept for 1 s while others waited" if missing else ""
    assert worker_pool.run(late, tmp_path, *missing, ranks=ranks) == [line] * ranks
    assert worker_pool.run(slow, tmp_path, *missing, ranks=ranks) == [""] * ranks


def test_a_rank_that_is_gone_is_no_late_one(worker_pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        worker_pool.run(gone, tmp_path, ranks=2)
    assert (tmp_path / "0").read_text().startswith("PeerLostError: rank 0 lost another rank: ")
