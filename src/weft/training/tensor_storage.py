"""Tensors of a checkpoint on disk, through torch's distributed checkpointing, with no rank waiting in it.

torch's own `save` and `load` wait for all ranks where files are written and read, and cannot say whom they
wait for. Here `save` only plans, which touches no file, and `load` is told that this rank is alone: it reads
what it is asked for, whatever the others do. Whoever calls these lets the ranks meet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.errors import RunError
from weft.files import flush
from weft.training.agreement import meeting_peers


class _PlannedWriter(HuggingFaceStorageWriter):
    """Keeps what torch has planned for this rank to write, and writes it when it is told."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch's own makes the folder, which is there

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._planned = partial(super().write_data, plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def write_planned(self) -> None:
        written = self._planned().wait()
        # torch flushes a file while its end still waits in Python's own buffer.
        for name in sorted({one.storage_data.relative_path for one in written}):
            flush(Path(self.path) / name)


class _Planner(DefaultLoadPlanner):
    """Tells of every tensor that has been read."""

    def __init__(self, progress: Callable[[], None]) -> None:
        super().__init__()
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._progress()


def plan_to_write(
    folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Agree which rank writes which tensors of all ranks; what this gives writes those of this rank.

    Every rank calls it. Of a tensor that several ranks have one writes it.

    Raises:
        RunError: on every rank, when tensors of one name do not fit together; what it gives raises it when
            something cannot be written.
    """
    writer = _PlannedWriter(str(folder), save_distributed=True)
    try:
        with meeting_peers():
            save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise _failure(folder, cause, rank) from error

    def write() -> None:
        try:
            writer.write_planned()
        except Exception as error:
            raise _failure(folder, error) from error

    return write


def known_tensors(path: Path) -> Mapping[str, Any]:
    """Size and properties of all tensors of a checkpoint by name, from the headers of its files.

    Raises:
        RunError: when a file cannot be read.
    """
    try:
        return HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise _failure(path, error) from error


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor], progress: Callable[[], None]) -> None:
    """Fill tensors by name, in their own precision, and tell of each.

    Raises:
        RunError: when one is missing or has another shape, or a file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(path))
            load(dict(tensors), storage_reader=reader, planner=_Planner(progress), no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise _failure(path, cause) from error


def _failure(path: Path, cause: BaseException, rank: int | None = None) -> RunError:
    """One line; of this rank if none is given."""
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return RunError(f"{path}: rank {dist.get_rank() if rank is None else rank}: {reason}")
