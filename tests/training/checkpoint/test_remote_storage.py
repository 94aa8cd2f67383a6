"""The storage of a run behind a URL: places of files, steps that count, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import InputError, RunError
from weft.training.checkpoint.manifest import MANIFEST
from weft.training.checkpoint.remote_storage import RemoteStorage, place_of


def storage_in(path: Path) -> RemoteStorage:
    return RemoteStorage(f"{path.as_uri()}/runs/one-12345678/")


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    storage, content = storage_in(tmp_path), bytes(range(256)) * 999
    (tmp_path / "given").write_bytes(content)
    storage.put(tmp_path / "given", place_of(7, "shard"))
    assert (tmp_path / "runs/one-12345678/checkpoints/step-00000007/shard").read_bytes() == content
    storage.get(place_of(7, "shard"), tmp_path / "new" / "shard")
    assert (tmp_path / "new" / "shard").read_bytes() == content


def test_whoever_waits_for_a_copy_learns_of_its_progress(tmp_path: Path) -> None:
    storage, told = RemoteStorage(f"memory://{tmp_path}"), list[int]()
    # More than one of fsspec's blocks of 5 MB.
    (tmp_path / "given").write_bytes(bytes(12_000_000))
    storage.put(tmp_path / "given", "file", lambda: told.append(1))
    assert len(told) > 1
    told.clear()
    storage.get("file", tmp_path / "back", lambda: told.append(1))
    assert len(told) > 1


def test_a_checkpoint_counts_from_its_manifest_on_until_it_is_forgotten(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    assert storage.steps() == []
    (tmp_path / "given").write_text("content")
    for step in (3, 123456789, 20):
        storage.put(tmp_path / "given", place_of(step, "shard"))
    assert storage.steps() == []
    for step in (3, 123456789, 20):
        storage.put(tmp_path / "given", place_of(step, MANIFEST))
    assert storage.steps() == [123456789, 20, 3]
    storage.forget(20)
    storage.forget(20)
    assert storage.steps() == [123456789, 3]
    assert not storage.has(place_of(20, "shard"))
    assert storage.has(place_of(3, "shard"))


def test_records_that_do_not_go_on_from_the_newest_checkpoint_give_way(
    tmp_path: Path,
) -> None:
    storage, kept = storage_in(tmp_path), tmp_path / "runs" / "one-12345678" / "metrics.jsonl"
    kept.parent.mkdir(parents=True)
    # The copy ends within a line.
    kept.write_text('{"step": 0}\n{"step": 1}\n{"st')
    own = tmp_path / "run" / "metrics.jsonl"
    own.parent.mkdir()
    whole = '{"step": 0}\n{"step": 1}\n'
    for before, after in (
        (None, whole),  # a new directory
        (whole + '{"step": 2}\n', whole + '{"step": 2}\n'),  # that of rank 0
        ('{"step": 0}\n', whole),  # that of a node which was away
        ('{"step": 0}\n{"step": 1, "loss": 2}\n{"step": 2}\n', whole),
    ):
        own.unlink(missing_ok=True)
        if before is not None:
            own.write_text(before)
        storage.bring_history(own.parent)
        assert own.read_text() == after
    assert [file.name for file in own.parent.iterdir()] == ["metrics.jsonl"]


def test_what_a_storage_refuses_is_one_line_with_its_url(tmp_path: Path) -> None:
    for url, problem in (
        ("gluster://volume/runs", "gluster://volume/runs: Protocol not known: gluster"),
        ("hdfs://name-node/runs", "hdfs://name-node/runs: "),
    ):
        with pytest.raises(InputError) as refused:
            RemoteStorage(url)
        assert str(refused.value).startswith(f"checkpoint.directory: {problem}")
        assert "\n" not in str(refused.value)
    storage = storage_in(tmp_path)
    storage.require_reachable()
    with pytest.raises(RunError, match=r"^file://.*/one-12345678/absent: FileNotFoundError: "):
        storage.get("absent", tmp_path / "absent")
    assert not list(tmp_path.glob("*absent*"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"checkpoint\.directory: file://.*/file/runs: NotADirectoryError"):
        RemoteStorage(f"{tmp_path.as_uri()}/file/runs").require_reachable()
