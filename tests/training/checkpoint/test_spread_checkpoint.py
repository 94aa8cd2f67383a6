"""Views of a checkpoint that is spread over nodes: each folder receives the tensors that its ranks read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import RankError, WorkerPool
from training.checkpoint.test_node_files import RANKS, apart, folder, held, state

from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.manifest import untold
from weft.training.checkpoint.spread_checkpoint import _joined, bring, is_view
from weft.training.checkpoint.tensor_folders import SafetensorsFolder
from weft.training.checkpoint.tensor_storage import known_tensors, read_tensors
from weft.training.checkpoint.training_state import read_state
from weft.training.coordination.attendance import Attendance

LENGTH = 1 << 20
NAMES = tuple(f"{name} {rank}" for rank in range(RANKS) for name in "abc")
# What each rank reads. Ranks 0 and 1 are of one folder, and rank 2 of another.
READ = (("a 0", "b 2"), ("a 2", "b 2", "c 1"), ("c 0", "a 2"))


def value_of(name: str) -> float:
    return float(NAMES.index(name) + 1)


def save(rank: int, ranks: int, path: Path) -> None:
    own = {name: torch.full((LENGTH,), value_of(name)) for name in NAMES if name.endswith(str(rank))}
    checkpoints.write(folder(path, rank), state(1), own, keep=1, nodes=apart(rank))


def read_view(rank: int, ranks: int, path: Path) -> tuple[list[str], int]:
    """The tensors that a rank finds in its view, and the bytes that the view takes on disk."""
    meeting = Attendance()
    view, _ = checkpoints.agree_on_newest(folder(path, rank), meeting, nodes=apart(rank))
    assert view is not None
    assert is_view(view)
    assert (view.name, read_state(view).step) == ("step-00000001", 1)
    assert set(known_tensors(view)) == set(NAMES)
    bring(view, READ[rank], apart(rank), None, untold, untold)
    rooms = {name: torch.zeros(LENGTH) for name in READ[rank]}
    read_tensors(view, rooms, untold)
    assert all((room == value_of(name)).all() for name, room in rooms.items())
    content = SafetensorsFolder(view)
    found = [name for name in NAMES if content.read(name).any()]
    taken = sum(512 * one.lstat().st_blocks for one in view.iterdir())
    checkpoints.forget_view(view, apart(rank), meeting)
    meeting.close()
    return found, taken


def test_a_folder_receives_what_its_ranks_read_and_keeps_none_of_it(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(save, tmp_path, ranks=RANKS)
    before = held(tmp_path, 1)
    first, second, other = worker_pool.run(read_view, tmp_path, ranks=RANKS)
    assert first == second
    own = {name for name in NAMES if not name.endswith("2")}
    assert set(first[0]) == own | {"a 2", "b 2"}
    assert set(other[0]) == {"a 2", "b 2", "c 2", "c 0"}
    # Blocks of a file system are of 4 kB.
    assert 8 * LENGTH <= first[1] < 8 * LENGTH + (1 << 16)
    assert 4 * LENGTH <= other[1] < 4 * LENGTH + (1 << 16)
    assert held(tmp_path, 1) == before
    assert not list(tmp_path.glob("*/.reading"))


def read_without_file(rank: int, ranks: int, path: Path) -> None:
    view, _ = checkpoints.agree_on_newest(folder(path, rank), nodes=apart(rank))
    assert view is not None
    if rank == 2:
        for one in (folder(path, rank) / view.name).glob("shard-*"):
            one.unlink()
    bring(view, READ[rank], apart(rank), None, untold, untold)


def test_a_file_that_is_gone_ends_all_ranks_with_its_name(worker_pool: WorkerPool, tmp_path: Path) -> None:
    worker_pool.run(save, tmp_path, ranks=RANKS)
    with pytest.raises(RankError, match=r"rank 2: .*shard-00003.*: No such file or directory"):
        worker_pool.run(read_without_file, tmp_path, ranks=RANKS)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1))
def test_neighbouring_spans_are_sent_as_one(gaps: list[tuple[int, int]]) -> None:
    spans, end = [], 0
    for gap, length in gaps:
        spans.append((end + gap, length))
        end += gap + length
    joined = _joined(spans)
    assert [byte for start, length in joined for byte in range(start, start + length)] == [
        byte for start, length in spans for byte in range(start, start + length)
    ]
    assert all(start + length < then for (start, length), (then, _) in pairwise(joined))
