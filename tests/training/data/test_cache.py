"""Entries of the cache are whole or not there, whoever builds them and whatever happens to them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.training.data.cache import cached, is_complete


def build(folder: Path) -> Mapping[str, Any]:
    (folder / "values").write_bytes(b"12345")
    return {"count": 5}


def never(folder: Path) -> Mapping[str, Any]:
    raise AssertionError("built although it was there")


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    entry = tmp_path / "kind" / "key"
    assert cached(entry, build) == {"count": 5}
    assert cached(entry, never) == {"count": 5}
    assert (entry / "values").read_bytes() == b"12345"


@pytest.mark.parametrize("damage", ["shorter", "missing", "unreadable", "foreign"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    entry = tmp_path / "key"
    cached(entry, build)
    if damage == "shorter":
        (entry / "values").write_bytes(b"1")
    elif damage == "missing":
        (entry / "values").unlink()
    else:
        (entry / "contents.json").write_text("{" if damage == "unreadable" else '{"sizes": 3}')
    assert not is_complete(entry)
    assert cached(entry, build) == {"count": 5}
    assert (entry / "values").read_bytes() == b"12345"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(folder: Path) -> Mapping[str, Any]:
        build(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(tmp_path / "key", fails)
    assert not any(tmp_path.iterdir())


def test_many_builders_at_once_leave_one_entry(tmp_path: Path) -> None:
    meeting = threading.Barrier(4)
    results: list[Mapping[str, Any]] = []

    def slowly(folder: Path) -> Mapping[str, Any]:
        meeting.wait(timeout=30)
        return build(folder)

    threads = [
        threading.Thread(target=lambda: results.append(cached(tmp_path / "key", slowly))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [{"count": 5}] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
