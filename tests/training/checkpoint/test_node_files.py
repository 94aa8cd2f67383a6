"""Checkpoints of directories that are apart: they complete each other, or say what no one has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pool import RankError, WorkerPool

from weft.errors import RunError
from weft.run.launch.nodes import JobNodes
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.manifest import MANIFEST, verify
from weft.training.checkpoint.training_state import TrainingState

pytestmark = pytest.mark.processes
RANKS = 3


def apart(rank: int) -> JobNodes:
    """Ranks 0 and 1 on one node, and rank 2 on another."""
    return JobNodes(rank, ((0, 1), (2,)), ((0, 1), (2,)))


def folder(path: Path, rank: int) -> Path:
    return path / ("one" if rank < 2 else "other")


def state(step: int) -> TrainingState:
    return TrainingState(
        step=step, plan_id="p", samples=0, seed=0, model="m", precision="fp32", data="d", first_loss=1.0
    )


def save(rank: int, ranks: int, path: Path, steps: range, keep: int) -> None:
    own = {f"tensor {rank}": torch.full((1 << 20,), float(rank))}
    for step in steps:
        checkpoints.write(folder(path, rank), state(step), own, keep=keep, nodes=apart(rank))


def newest(rank: int, ranks: int, path: Path) -> tuple[str, list[str]]:
    try:
        found, skipped = checkpoints.agree_on_newest(folder(path, rank), nodes=apart(rank), completes=True)
    except RunError as error:
        return "refused", [str(error)]
    if found is None:
        return "none", skipped
    verify(found)
    return found.name, skipped


def held(path: Path, step: int) -> tuple[set[str], set[str]]:
    both = (path / name / f"step-{step:08d}" for name in ("one", "other"))
    one, other = ({file.name for file in each.iterdir()} if each.exists() else set() for each in both)
    return one, other


def test_each_directory_keeps_its_own_files_and_the_manifest_of_all(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 4), 2, ranks=RANKS)
    assert held(tmp_path, 1) == (set(), set())
    one, other = held(tmp_path, 3)
    assert one & other == {MANIFEST, "state.json"}
    assert (len(one), len(other)) == (4, 3)


def test_no_directory_loses_a_checkpoint_before_all_have_the_next(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, range(1, 2), 1, ranks=RANKS)
    (tmp_path / "other" / "step-00000002").write_text("in the way of the next one's name")
    with pytest.raises(RankError, match=r"rank 2: .*step-00000002: Not a directory"):
        worker_pool.run(save, tmp_path, range(2, 3), 1, ranks=RANKS)
    (tmp_path / "other" / "step-00000002").unlink()
    told = worker_pool.run(newest, tmp_path, ranks=RANKS)
    assert {name for name, _ in told} == {"step-00000001"}, told


@pytest.mark.parametrize("lost", ["nothing", "a directory", "the newest of one"])
def test_directories_complete_each_other(worker_pool: WorkerPool, tmp_path: Path, lost: str) -> None:
    worker_pool.run(save, tmp_path, range(1, 3), 2, ranks=RANKS)
    expected, skipped = "step-00000002", 0
    if lost == "a directory":
        # The whole checkpoint of the one directory makes that of the other.
        worker_pool.run(newest, tmp_path, ranks=RANKS)
        shutil.rmtree(tmp_path / "other")
    elif lost == "the newest of one":
        shutil.rmtree(tmp_path / "other" / "step-00000002")
        expected, skipped = "step-00000001", 1
    for name, reasons in worker_pool.run(newest, tmp_path, ranks=RANKS):
        assert name == expected
        assert len(reasons) == skipped
        assert all("no directory has shard-00003" in one for one in reasons)
    one, other = held(tmp_path, int(expected[-1]))
    assert one == other


def test_a_damaged_file_is_named_with_the_rank_that_has_it(worker_pool: WorkerPool, tmp_path: Path) -> None:
    worker_pool.run(save, tmp_path, range(1, 2), 1, ranks=RANKS)
    (shard,) = (tmp_path / "other" / "step-00000001").glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for name, (reason,) in worker_pool.run(newest, tmp_path, ranks=RANKS):
        assert name == "refused"
        assert f"rank 2: {shard}: damaged" in reason


def test_without_any_checkpoint_there_is_none(worker_pool: WorkerPool, tmp_path: Path) -> None:
    assert worker_pool.run(newest, tmp_path, ranks=RANKS) == [("none", [])] * RANKS
