"""Counted work: every part is told, in this process and through a file in another."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from weft.progress import CountedWork, ProgressFile, WorkDone


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 60))
def test_counts_rise_to_the_total_and_no_further(parts: list[int], total: int) -> None:
    told: list[WorkDone] = []
    counted = CountedWork(told.append, "weaving", total, "picks")
    for part in parts:
        counted.finish(part)
    counts = [0, *(sum(parts[: number + 1]) for number in range(len(parts)))]
    assert told == [WorkDone("weaving", min(count, total), total, "picks") for count in counts]


def test_a_part_is_finished_when_the_next_is_asked_for() -> None:
    told: list[WorkDone] = []
    parts = CountedWork(told.append, "weaving", 2, "picks").each("ab")
    assert (next(parts), told[-1].done) == ("a", 0)
    assert (next(parts), told[-1].done) == ("b", 1)
    assert (next(parts, None), told[-1].done) == (None, 2)


def test_a_file_tells_the_newest_and_always_the_last(tmp_path: Path) -> None:
    file, told = ProgressFile(tmp_path / "progress.json"), list[WorkDone]()
    with file.polled(told.append) as poll:
        poll()
        for work in ("warp", "weft"):
            counted = CountedWork(ProgressFile(tmp_path / "progress.json").write, work, 1000, "picks")
            poll()
            for _ in counted.each(range(1000)):
                pass
    assert told == [
        WorkDone("warp", 0, 1000, "picks"),
        WorkDone("weft", 0, 1000, "picks"),
        WorkDone("weft", 1000, 1000, "picks"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_is_not_told(tmp_path: Path) -> None:
    ProgressFile(tmp_path / "progress.json").write(WorkDone("warp", 3, 4, "picks"))
    told: list[WorkDone] = []
    with ProgressFile(tmp_path / "progress.json").polled(told.append) as poll:
        poll()
    assert told == []


def test_a_disk_that_takes_no_file_stops_no_work(tmp_path: Path) -> None:
    (tmp_path / "progress.json").mkdir()
    CountedWork(ProgressFile(tmp_path / "progress.json").write, "warp", 1, "picks").finish()
