"""Tensors of a checkpoint on disk, through torch's distributed checkpointing, without waits for ranks.

torch's own `save` and `load` wait for all ranks while files are written and read. They do not name the late
rank, and they send pickles. Here the ranks first agree on the writer of each tensor, without file access.
Then each rank writes by itself with the parts of `save`. It reads by itself with `load(no_dist=True)`. The
caller lets the ranks meet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from weft.errors import RunError
from weft.files import flush
from weft.training.coordination.agreement import gather


class _Planner(DefaultLoadPlanner):
    """A load planner that calls `progress` after every tensor."""

    def __init__(self, progress: Callable[[], None]) -> None:
        super().__init__()
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._progress()


def plan_to_write(
    folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Agree on the writer rank of every tensor; return a function that writes this rank's tensors.

    Every rank calls it. A tensor that several ranks hold is written by one of them.

    Raises:
        RunError: on every rank, if tensors of one name differ in type or shape; from the returned function,
            if a write fails.
    """
    own = {name: [f"{tensor.dtype} {list(tensor.shape)}", tensor.nbytes] for name, tensor in tensors.items()}
    held = gather(own, group)
    writers = _writers(folder, held)
    rank = dist.get_rank()
    mine = {name: tensor for name, tensor in tensors.items() if writers[name] == rank}

    def write() -> None:
        planner, writer = DefaultSavePlanner(), HuggingFaceStorageWriter(str(folder), save_distributed=True)
        planner.set_up_planner(mine)
        # The plan's place among all ranks' plans names the file.
        plan = writer.prepare_global_plan([planner.create_local_plan()] * len(held))[rank]
        try:
            written = writer.write_data(planner.finish_plan(plan), planner).wait()
            # torch flushes a file while its end still waits in Python's own buffer.
            for name in sorted({one.storage_data.relative_path for one in written}):
                flush(folder / name)
        except Exception as error:
            raise _failure(folder, error) from error

    return write


def _writers(folder: Path, held: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, int]:
    """Return the writer rank of each tensor: its holder with the fewest bytes to write so far.

    `held` has (type and shape, bytes) of each tensor, by rank and name.
    """
    owners: dict[str, list[int]] = {}
    for rank, found in enumerate(held):
        for name, (kind, _) in found.items():
            ranks = owners.setdefault(name, [])
            if ranks and held[ranks[0]][name][0] != kind:
                raise RunError(
                    f"{folder}: rank {rank}: {name} is {kind}, elsewhere {held[ranks[0]][name][0]}"
                )
            ranks.append(rank)
    bytes_of, writers = [0] * len(held), {}
    for name, ranks in owners.items():
        writers[name] = min(ranks, key=bytes_of.__getitem__)
        bytes_of[writers[name]] += held[ranks[0]][name][1]
    return writers


def known_tensors(path: Path) -> Mapping[str, Any]:
    """Return the size and properties of all tensors of a checkpoint by name, from its file headers.

    Raises:
        RunError: if a file cannot be read.
    """
    try:
        return HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise _failure(path, error) from error


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor], progress: Callable[[], None]) -> None:
    """Fill tensors by name, in their own precision, and call `progress` after each.

    Raises:
        RunError: if one is missing or has another shape, or a file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(path))
            load(dict(tensors), storage_reader=reader, planner=_Planner(progress), no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise _failure(path, cause) from error


def _failure(path: Path, cause: BaseException) -> RunError:
    """Return an error of one line, with path and rank."""
    # The error of a full disk names no file.
    told = cause.strerror if isinstance(cause, OSError) and cause.filename is None else None
    reason = told or " ".join(str(cause).split()) or type(cause).__name__
    return RunError(f"{path}: rank {dist.get_rank()}: {reason}")
