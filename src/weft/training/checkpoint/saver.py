"""`Saver`: a run's checkpoints, written in the background while the run trains.

Between two steps every rank copies its tensors to host memory. Training waits only for this copy; on an
accelerator only optimizers do. A thread on every rank then writes the copies (`checkpoints.write`). These
threads have a separate process group, in which they agree that all files are on disk. A save waits for the
save before it. Ranks learn a save's outcome between two steps without waiting. If a rank's save has failed,
its vote in the next step says so, and all ranks fail together. They also fail if a rank is late with its part
(`weft.training.coordination.attendance`).

torch's own `async_save` is not used: its future is done as soon as the tensors are written. The manifest,
the rename and the agreement on both would be left to the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.errors import RunError
from weft.run.launch.failures import PeerLostError
from weft.run.launch.nodes import JobNodes
from weft.run.methods import CopyBeside, MethodState
from weft.run.streams import Completion, Value
from weft.training.checkpoint.checkpoints import (
    NO_METHODS,
    SAVE_TIMEOUT_S,
    collect,
    copy_to_host,
    room_for,
    write,
)
from weft.training.checkpoint.manifest import generations
from weft.training.checkpoint.remote_storage import RemoteStorage
from weft.training.checkpoint.stage_tensors import NO_SHARDS, Shards
from weft.training.checkpoint.training_state import TrainingState
from weft.training.coordination.agreement import together
from weft.training.coordination.attendance import Attendance, LateRankError

# The time that a failing rank gives to a save that is under way. Without one of the ranks, it can only end if
# all have written.
FAREWELL_S, WITHOUT_A_RANK_S = 30.0, 3.0
# A rank that waits for its own save checks at this interval if another rank has given the save up.
LOOK_S = 0.5


# Does work that follows the last step, with the values that it reads; see `RankRuntime.copy`.
Copy = Callable[[Callable[[], None], Value[Any]], Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint under its final name.

    Attributes:
        stall_s: seconds that this rank's host stood still, for the copy and for the end of the save before.
        write_s: seconds from the end of the copy until the rename.
        bytes: bytes of all ranks' files.
    """

    step: int
    stall_s: float
    write_s: float
    bytes: int


class Saver:
    """One rank's saves, one at a time; every rank makes a saver and calls it between the same steps.

    It is a context manager: its exit ends the thread. After an error, a save under way gets `farewell_s`.

    Args:
        directory: the directory of the checkpoints.
        keep: the number of checkpoints that stay.
        resumed_step: checkpoints of later steps are damaged; the next whole checkpoint replaces them.
        ranks: all ranks, for this saver alone.
        copy: does the work that copies the tensors; the passes of the next step may run beside it.
        timeout_s: the longest wait of a save for a rank that writes nothing.
        nodes, storage: as in `checkpoints.write`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        resumed_step: int,
        ranks: Attendance,
        copy: Copy,
        timeout_s: float = SAVE_TIMEOUT_S,
        nodes: JobNodes | None = None,
        storage: RemoteStorage | None = None,
    ) -> None:
        self._copy = copy
        self._nodes = nodes
        self._storage = storage
        self._directory = directory
        self._keep = keep
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._damaged = [path for step, path in generations(directory) if step > resumed_step]
        self._room: dict[str, torch.Tensor] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weft checkpoint")
        self._step = 0
        self._stall_s = 0.0
        self._writing: Future[tuple[float, int]] | None = None
        # A save that waits for the copies of a step.
        self._begun: tuple[TrainingState, Completion, CopyBeside | None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writing is not None:
            wait_for([self._writing], farewell_s(kind))
        stuck = self._writing is not None and not self._writing.done()
        self._threads.shutdown(wait=not stuck)

    def save(
        self,
        state: TrainingState,
        stages: Mapping[int, nn.Module],
        optimizers: Mapping[int, torch.optim.Optimizer],
        shards: Shards = NO_SHARDS,
        methods: Mapping[str, MethodState] = NO_METHODS,
        beside: CopyBeside | None = None,
    ) -> list[Saved]:
        """Copy the tensors and begin to write them; return the save before, if it was still under way.

        If copies are made `beside` the next step, the write begins with `go_on` after that step.

        Raises:
            RunError: on every rank, if the save before failed on one rank.
        """
        before = self.wait()
        started_s = time.monotonic()
        tensors = collect(stages, optimizers, shards, methods)
        self._room = room_for(tensors, self._room)
        now = tensors if beside is None else beside.take(tensors, self._room)
        copied = self._copy(partial(copy_to_host, now, self._room), Value.of(now))
        self._step, self._stall_s = state.step, time.monotonic() - started_s
        self._begun = state, copied, beside
        if beside is None:
            self.go_on()
        return before

    def go_on(self) -> None:
        """Begin to write a save whose tensors the step before has copied, if there is one."""
        if self._begun is None:
            return
        (state, copied, beside), self._begun = self._begun, None
        ends = [copied] if beside is None else [copied, *beside.copied()]
        self._writing = self._threads.submit(self._write, state, ends)

    @property
    def failed(self) -> bool:
        """True if the save under way has failed on this rank."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def fail(self) -> None:
        """Raise the error of a failed save; every rank calls it after a vote that reports a failed save.

        Raises:
            RunError: the same on every rank.
        """
        # This comes first, because the training of a late rank may be stuck as well.
        self._ranks.require_nobody_late()
        with together():
            if self._writing is not None and self.failed:
                self._writing.result()

    def poll(self) -> list[Saved]:
        """Return the save that has succeeded since the last call, if there is one; do not wait."""
        if self._writing is None or not self._writing.done() or self.failed:
            return []
        write_s, size = self._writing.result()
        self._writing = None
        return [Saved(step=self._step, stall_s=self._stall_s, write_s=write_s, bytes=size)]

    def wait(self) -> list[Saved]:
        """Wait for the save that is under way and return it, if there is one.

        Raises:
            RunError: on every rank, if it failed on one rank.
        """
        if self._writing is not None:
            started_s = time.monotonic()
            while wait_for([self._writing], LOOK_S).not_done:
                self._ranks.require_nobody_late()
            self._stall_s += time.monotonic() - started_s
        self.fail()
        return self.poll()

    def _write(self, state: TrainingState, copied: Sequence[Completion]) -> tuple[float, int]:
        try:
            for one in copied:
                one.wait()
            started_s = time.monotonic()
            size = write(
                self._directory,
                state,
                self._room,
                keep=self._keep,
                damaged=self._damaged,
                ranks=self._ranks,
                timeout_s=self._timeout_s,
                nodes=self._nodes,
                storage=self._storage,
            )
        except RunError:
            raise
        except Exception as error:
            # Errors of any kind become RunError, so that the vote reports them to all ranks.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"{self._directory}: the checkpoint of step {state.step}: {reason}") from error
        self._damaged = []
        return time.monotonic() - started_s, size


def farewell_s(error: type[BaseException] | None) -> float | None:
    """Return the seconds given to a save under way: no limit without error, 0 after a late rank."""
    if error is None:
        return None
    if issubclass(error, LateRankError):
        return 0.0
    return WITHOUT_A_RANK_S if issubclass(error, PeerLostError) else FAREWELL_S
