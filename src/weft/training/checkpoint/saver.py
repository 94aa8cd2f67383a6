"""`Saver`: writes the checkpoints of a run while it trains on.

Between two steps every rank copies its tensors to host memory; that is all that training waits for. A thread
on every rank then writes the copies, and these threads agree among themselves, over a process group of their
own, that all is on the disk and what it is called (`weft.training.checkpoint.checkpoints.write`). A save
waits for the one before it. How a save went is learned between two steps without waiting: a rank whose save
has failed says so in the vote of the next step, and all ranks fail together. So they do when a rank is late
with its part (`weft.training.coordination.attendance`), which is stuck itself but learns it from the others.

torch's own `async_save` is not used: its future is done when the tensors are written, which leaves the
manifest, the rename and the agreement on both to the thread that trains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from weft.errors import RunError
from weft.run.methods import MethodState
from weft.training.checkpoint.checkpoints import NO_METHODS, SAVE_TIMEOUT_S, collect, copy_to_host, write
from weft.training.checkpoint.manifest import generations
from weft.training.checkpoint.optimizer_states import NO_SHARDS, Shards
from weft.training.checkpoint.training_state import TrainingState
from weft.training.coordination.agreement import together
from weft.training.coordination.attendance import Attendance, LateRankError

# How long a rank that fails lets a save that is under way end.
FAREWELL_S = 30.0
# How often a rank that waits for its own save asks whether another one has given it up.
LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that has its name.

    Attributes:
        stall_s: how long training stood still for it on this rank: until all was copied, and where it waited
            for the save to end.
        write_s: from the end of the copy until the checkpoint had its name.
        bytes: of all ranks' files.
    """

    step: int
    stall_s: float
    write_s: float
    bytes: int


class Saver:
    """Saves of one rank, one at a time; every rank makes one and calls it between the same steps.

    A context manager: leaving it ends its thread. Where an error is the reason, the save that is under way
    gets `FAREWELL_S` to end.

    Args:
        directory: of the checkpoints.
        keep: how many stay.
        resumed_step: what is there of later steps is damaged, and removed when the next checkpoint is whole.
        ranks: all ranks, for nothing else while this is open.
        timeout_s: how long a save waits for a rank that writes nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        resumed_step: int,
        ranks: Attendance,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
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

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writing is not None:
            wait_for([self._writing], _farewell_s(kind))
        stuck = self._writing is not None and not self._writing.done()
        self._threads.shutdown(wait=not stuck)

    def save(
        self,
        state: TrainingState,
        stages: Mapping[int, nn.Module],
        optimizers: Mapping[int, torch.optim.Optimizer],
        shards: Shards = NO_SHARDS,
        methods: Mapping[str, MethodState] = NO_METHODS,
    ) -> list[Saved]:
        """Copy the tensors and begin to write them; returns the save before, if it had to be waited for.

        Raises:
            RunError: on every rank, when the save before has failed on one.
        """
        before = self.wait()
        started_s = time.monotonic()
        self._room = copy_to_host(collect(stages, optimizers, shards, methods), self._room)
        self._step, self._stall_s = state.step, time.monotonic() - started_s
        self._writing = self._threads.submit(self._write, state)
        return before

    @property
    def failed(self) -> bool:
        """Whether the save under way is known to have failed on this rank."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def fail(self) -> None:
        """Raise what made a save fail; every rank calls it after a vote has said that one did.

        Raises:
            RunError: the same on every rank.
        """
        # First, as the training of a late rank may be stuck as well.
        self._ranks.require_nobody_late()
        with together():
            if self._writing is not None and self.failed:
                self._writing.result()

    def poll(self) -> list[Saved]:
        """Return the save that has ended well since it was last asked for, if there is one; does not wait."""
        if self._writing is None or not self._writing.done() or self.failed:
            return []
        write_s, size = self._writing.result()
        self._writing = None
        return [Saved(step=self._step, stall_s=self._stall_s, write_s=write_s, bytes=size)]

    def wait(self) -> list[Saved]:
        """Wait for the save that is under way and return it, if there is one.

        Raises:
            RunError: on every rank, when it has failed on one.
        """
        if self._writing is not None:
            started_s = time.monotonic()
            while wait_for([self._writing], LOOK_S).not_done:
                self._ranks.require_nobody_late()
            self._stall_s += time.monotonic() - started_s
        self.fail()
        return self.poll()

    def _write(self, state: TrainingState) -> tuple[float, int]:
        started_s = time.monotonic()
        try:
            size = write(
                self._directory,
                state,
                self._room,
                keep=self._keep,
                damaged=self._damaged,
                ranks=self._ranks,
                timeout_s=self._timeout_s,
            )
        except RunError:
            raise
        except Exception as error:
            # Of any kind, so that the vote tells it to all ranks.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"{self._directory}: the checkpoint of step {state.step}: {reason}") from error
        self._damaged = []
        return time.monotonic() - started_s, size


def _farewell_s(error: type[BaseException] | None) -> float | None:
    """How long a save that is under way gets to end; none where the others have given it up."""
    if error is None:
        return None
    return 0.0 if issubclass(error, LateRankError) else FAREWELL_S
