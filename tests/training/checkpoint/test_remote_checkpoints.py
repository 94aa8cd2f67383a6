"""Checkpoints that nodes copy to a storage: lost directories get them back, each file once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import RankError, WorkerPool
from training.checkpoint.test_node_files import RANKS, apart, folder, held, state

from weft.errors import RunError
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.manifest import MANIFEST, generation_path, untold
from weft.training.checkpoint.remote_storage import RemoteStorage, place_of
from weft.training.checkpoint.tensor_storage import known_tensors

pytestmark = pytest.mark.processes
LENGTH = 1 << 16


def store(path: Path) -> RemoteStorage:
    return RemoteStorage(f"{path.as_uri()}/store")


def place(path: Path, step: int, name: str = "") -> Path:
    return path / "store" / place_of(step, name)


def save(rank: int, ranks: int, path: Path, steps: range, keep: int) -> None:
    for step in steps:
        own = {f"tensor {rank}": torch.full((LENGTH,), float(step))}
        checkpoints.write(
            folder(path, rank), state(step), own, keep=keep, nodes=apart(rank), storage=store(path)
        )


class FullStorage(RemoteStorage):
    def put(self, path: Path, where: str, progress: Callable[[], None] = untold) -> None:
        raise RunError(f"{self.url}/{where}: full")


def save_to_full(rank: int, ranks: int, path: Path) -> None:
    """Save step 2 to a storage that has no room for rank 1's files."""
    own, url = {f"tensor {rank}": torch.zeros(LENGTH)}, store(path).url
    storage = FullStorage(url) if rank == 1 else RemoteStorage(url)
    checkpoints.write(folder(path, rank), state(2), own, keep=1, nodes=apart(rank), storage=storage)


class UnreachableStorage(RemoteStorage):
    def get(self, where: str, path: Path, progress: Callable[[], None] = untold) -> None:
        if "shard" in where:
            raise RunError(f"{self.url}/{where}: no connection")
        super().get(where, path, progress)


def newest_from_unreachable(rank: int, ranks: int, path: Path) -> None:
    storage = UnreachableStorage(store(path).url)
    checkpoints.agree_on_newest(folder(path, rank), nodes=apart(rank), storage=storage)


def newest(rank: int, ranks: int, path: Path) -> tuple[str, list[str]]:
    found, skipped = checkpoints.agree_on_newest(folder(path, rank), nodes=apart(rank), storage=store(path))
    if found is None:
        return "none", skipped
    assert set(known_tensors(found)) == {f"tensor {one}" for one in range(RANKS)}
    return found.name, skipped


def files(path: Path) -> set[str]:
    return {one.name for one in path.iterdir()} if path.is_dir() else set()


def test_a_storage_has_the_files_of_all_nodes_and_keeps_as_many_checkpoints(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 4), 2, ranks=RANKS)
    assert store(tmp_path).steps() == [3, 2]
    for step in (2, 3):
        one, other = held(tmp_path, step)
        assert files(place(tmp_path, step)) == one | other
    assert not place(tmp_path, 1).exists()


def test_lost_directories_get_a_checkpoint_back_each_file_once(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 3), 2, ranks=RANKS)
    expected = files(place(tmp_path, 2)) - {MANIFEST}
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "other")
    assert worker_pool.run(newest, tmp_path, ranks=RANKS) == [("step-00000002", [])] * RANKS
    one, other = (files(generation_path(tmp_path / name, 2)) - {MANIFEST} for name in ("one", "other"))
    assert (one | other, one & other) == (expected, set())
    assert one
    assert other


def test_a_damaged_file_is_brought_anew_and_whole_ones_stay(worker_pool: WorkerPool, tmp_path: Path) -> None:
    worker_pool.run(save, tmp_path, range(1, 3), 2, ranks=RANKS)
    damaged = next(generation_path(tmp_path / "other", 2).glob("shard-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    kept = generation_path(tmp_path / "one", 2)
    before = {one.name: one.stat().st_mtime_ns for one in kept.glob("shard-*")}
    assert worker_pool.run(newest, tmp_path, ranks=RANKS) == [("step-00000002", [])] * RANKS
    after = {one.name: one.stat().st_mtime_ns for one in kept.glob("shard-*")}
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {damaged.name}


def test_a_checkpoint_of_the_storage_counts_only_if_it_is_newer_and_whole(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 3), 2, ranks=RANKS)
    for name in ("one", "other"):
        shutil.rmtree(tmp_path / name)
    damaged = next(place(tmp_path, 2).glob("shard-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    [(found, skipped), *_] = worker_pool.run(newest, tmp_path, ranks=RANKS)
    assert found == "step-00000001"
    assert skipped[0].endswith(f"{damaged.name}: damaged: its SHA-256 is not the manifest's")
    # The next save replaces it.
    worker_pool.run(save, tmp_path, range(2, 3), 2, ranks=RANKS)
    shutil.rmtree(tmp_path / "one")
    [(found, skipped), *_] = worker_pool.run(newest, tmp_path, ranks=RANKS)
    assert (found, skipped) == ("step-00000002", [])


def test_a_storage_that_fails_while_it_is_read_ends_the_start(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    """The run does not go on from an older checkpoint, whose next save would remove the newer one there."""
    worker_pool.run(save, tmp_path, range(1, 3), 2, ranks=RANKS)
    for name in ("one", "other"):
        shutil.rmtree(generation_path(tmp_path / name, 2))
    with pytest.raises(RankError, match=r"store/checkpoints/step-00000002/shard.*: no connection"):
        worker_pool.run(newest_from_unreachable, tmp_path, ranks=RANKS)
    assert store(tmp_path).steps() == [2, 1]
    # Once it is reached again, the start goes on.
    assert worker_pool.run(newest, tmp_path, ranks=RANKS) == [("step-00000002", [])] * RANKS


def test_a_damaged_manifest_of_the_storage_counts_as_no_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 3), 2, ranks=RANKS)
    shard = next(generation_path(tmp_path / "one", 2).glob("shard-*"))
    (shard.parent / MANIFEST).unlink()
    place(tmp_path, 2, MANIFEST).write_text("no manifest")
    [(found, [line, *_]), *_] = worker_pool.run(newest, tmp_path, ranks=RANKS)
    assert found == "step-00000001"
    assert line == f"{store(tmp_path).url}/checkpoints/step-00000002/{MANIFEST}: damaged"
    assert shard.exists()


def test_a_storage_that_fails_ends_all_ranks_and_leaves_the_checkpoints_of_nodes(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 2), 1, ranks=RANKS)
    with pytest.raises(RankError, match=r"file://.*/store/checkpoints/step-00000002/.*: full"):
        worker_pool.run(save_to_full, tmp_path, ranks=RANKS)
    assert store(tmp_path).steps() == [1]
    for name in ("one", "other"):
        assert MANIFEST in files(generation_path(tmp_path / name, 1))
        assert MANIFEST in files(generation_path(tmp_path / name, 2))
