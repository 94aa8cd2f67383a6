"""`Executor`: one rank's part of a Program, as a flat list of closures.

The main thread goes through the list in issue order. It computes; transfers it only posts, and they go on
in the threads of their streams. Whoever reads a value waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from weft.errors import InputError, RunError, Violation
from weft.program.kinds import KINDS
from weft.program.program import Instruction, Program
from weft.run.handlers import HANDLERS
from weft.run.handlers.base import Compute, Handler, Transfer
from weft.run.recorder import Recorder
from weft.run.work_queue import Handle
from weft.run.workspace import Batch, Workspace

Record = Callable[[int, int, int, int, int], None]


class Executor:
    """Runs the instructions of one rank, step after step.

    Raises:
        InputError: when the program holds an instruction that no handler executes.
    """

    def __init__(
        self,
        program: Program,
        workspace: Workspace,
        *,
        recorder: Recorder | None = None,
        handlers: Mapping[str, Handler] = HANDLERS,
    ) -> None:
        require_supported(program, handlers)
        self._workspace = workspace
        self._record: Record = recorder.record if recorder is not None else _forget
        self._begin: Callable[[int], None] = recorder.begin if recorder is not None else _forget_step
        device = workspace.resources.device
        self._settle = torch.cuda.synchronize if device.type == "cuda" else _nothing
        self._posted: list[Handle] = []
        self._in_flight: list[Handle] = []
        self._actions = [
            (instruction, self._bind(instruction, handlers[instruction.kind.name](workspace, instruction)))
            for instruction in program.of_rank(workspace.resources.rank)
        ]

    def run_step(self, step: int, batch: Batch) -> float:
        """Execute one step and return this rank's share of the loss.

        Raises:
            RunError: naming the rank, the step and the instruction; a transfer that fails after its last
                reader is reported by the following step.
        """
        workspace = self._workspace
        workspace.step, workspace.batch, workspace.loss = step, batch, 0.0
        self._begin(step)
        reached: Instruction | None = None
        try:
            for reached, action in self._actions:  # noqa: B007
                action()
            # Sends of this step may still be under way; those of the step before have long been received.
            self.drain()
        except RunError as error:
            raise type(error)(f"{self._where(reached)}: {error}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{self._where(reached)}: {reason}") from error
        self._in_flight = self._posted.copy()
        self._posted.clear()
        return workspace.loss

    def drain(self) -> None:
        """Wait for the transfers of the last finished step.

        Raises:
            RunError: when one has failed.
        """
        for handle in self._in_flight:
            handle.wait()
        self._in_flight = []

    def _where(self, instruction: Instruction | None) -> str:
        return (
            f"rank {self._workspace.resources.rank}, step {self._workspace.step}, instruction {instruction}"
        )

    def _bind(self, instruction: Instruction, action: Compute | Transfer) -> Callable[[], None]:
        if isinstance(action, Compute):
            return self._computing(instruction.position, action)
        return self._posting(instruction.position, action)

    def _computing(self, position: int, compute: Compute) -> Callable[[], None]:
        clock, record, workspace, settle = time.monotonic_ns, self._record, self._workspace, self._settle

        def run() -> None:
            posted_ns = clock()
            compute.ready()
            start_ns = clock()
            compute.execute()
            settle()
            record(workspace.step, position, posted_ns, start_ns, clock())

        return run

    def _posting(self, position: int, transfer: Transfer) -> Callable[[], None]:
        # No action holds the executor: process groups end with the last reference to what holds them.
        clock, record, workspace, posted = time.monotonic_ns, self._record, self._workspace, self._posted

        def run() -> None:
            posted_ns, step = clock(), workspace.step

            def stamp(start_ns: int, end_ns: int) -> None:
                record(step, position, posted_ns, start_ns, end_ns)

            posted.append(transfer.post(stamp))

        return run


def require_supported(program: Program, handlers: Mapping[str, Handler] = HANDLERS) -> None:
    """Refuse a program that this runtime cannot execute; call it before any process group starts.

    Raises:
        InputError: one line for everything that is not supported yet.
    """
    used = sorted({KINDS[int(code)].name for code in set(program.columns.kind.tolist())} - set(handlers))
    problems = [f"instructions of kind {name!r} are" for name in used]
    if program.steps_per_cycle != 1:
        problems.append(f"a cycle of {program.steps_per_cycle} steps is")
    if len(program) and int(program.columns.iteration.min()) < 0:
        problems.append("a prologue is")
    producers = [producer for producer, _ in program.obligations.stage_edges]
    consumers = [consumer for _, consumer in program.obligations.stage_edges]
    if len(set(producers)) < len(producers) or len(set(consumers)) < len(consumers):
        problems.append("a stage with more than one neighbour on a side is")
    if problems:
        raise InputError(
            [Violation("program", f"{text} not supported by this runtime yet") for text in problems]
        )


def _forget(step: int, position: int, posted_ns: int, start_ns: int, end_ns: int) -> None:
    """Times that nobody asked for."""


def _forget_step(step: int) -> None:
    """A step that nobody follows."""


def _nothing() -> None:
    """A synchronous device has finished when the call returns."""
