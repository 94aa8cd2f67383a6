"""`Executor`: one rank's part of a Program, as a flat list of closures.

The main thread goes through the list in issue order and issues every instruction to its stream. What that
blocks is up to the stream (`weft.run.streams`); the executor itself waits at the end of a step only, for what
the step before has left under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from weft.bundles import runtime_parts
from weft.errors import InputError, RunError, Violation
from weft.program.kinds import KINDS
from weft.program.program import Instruction
from weft.program.rank_program import RankProgram
from weft.run.handlers import HANDLERS
from weft.run.handlers.base import Handler, Issue
from weft.run.methods import HandlerOf
from weft.run.record.recorder import Recorder
from weft.run.streams import Completion, Value
from weft.run.workspace import Batch, Workspace

Record = Callable[[int, int, int, int, int], None]


class Outcome(NamedTuple):
    """What a step tells the host: this rank's shares of the loss and of what methods tell, their figures, and
    rows of such, which may still be on their way; all but the loss by name."""

    loss: float
    shares: Mapping[str, float]
    figures: Mapping[str, float]
    series: Mapping[str, Value[torch.Tensor]]


class Executor:
    """Runs the instructions of one rank, step after step.

    Raises:
        InputError: when the program holds an instruction that no handler executes.
    """

    def __init__(
        self,
        program: RankProgram,
        workspace: Workspace,
        *,
        recorder: Recorder | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        handlers = all_handlers() if handlers is None else handlers
        require_supported(program, handlers)
        self._workspace = workspace
        self._record: Record = recorder.record if recorder is not None else _forget
        self._begin: Callable[[int], None] = recorder.begin if recorder is not None else _forget_step
        self._posted: list[Completion] = []
        self._in_flight: list[Completion] = []
        # What to do in each step of the cycle.
        self._actions: list[list[tuple[Instruction, Callable[[], None]]]] = [
            [] for _ in range(program.steps_per_cycle)
        ]
        for one in program.instructions():
            bound = self._bind(one, handlers[one.kind.name](workspace, one))
            self._actions[one.iteration].append((one, bound))

    def run_step(self, step: int, batch: Batch) -> Outcome:
        """Execute one step, of which only the outcome is waited for.

        `step` counts from 0 over the whole job, and cycles with it.

        Raises:
            RunError: naming the rank, the step and the instruction; one that fails after its last
                reader is reported by the following step.
        """
        workspace = self._workspace
        workspace.begin(step, batch)
        self._begin(step)
        reached: Instruction | None = None
        try:
            for reached, action in self._actions[step % len(self._actions)]:  # noqa: B007
                action()
            # Sends of this step may still be under way; those of the step before have long been received.
            self.drain()
            outcome = self._outcome()
        except RunError as error:
            raise type(error)(f"{self._where(reached)}: {error}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{self._where(reached)}: {reason}") from error
        self._in_flight = self._posted.copy()
        self._posted.clear()
        return outcome

    def drain(self) -> None:
        """Wait for what the last finished step has left under way; all times are known then.

        Raises:
            RunError: when something has failed.
        """
        for completion in self._in_flight:
            completion.wait()
        self._in_flight = []

    def _outcome(self) -> Outcome:
        workspace = self._workspace
        methods = workspace.resources.methods.values()
        figures = {name: value for one in methods for name, value in one.figures(workspace).items()}
        series = {name: value for one in methods for name, value in one.series(workspace).items()}
        return Outcome(
            workspace.read_loss(),
            {name: share for one in methods for name, share in one.shares(workspace).items()},
            {name: workspace.read(value) for name, value in figures.items()},
            series,
        )

    def _where(self, instruction: Instruction | None) -> str:
        return (
            f"rank {self._workspace.resources.rank}, step {self._workspace.step}, instruction {instruction}"
        )

    def _bind(self, instruction: Instruction, issue: Issue) -> Callable[[], None]:
        # No action holds the executor: process groups end with the last reference to what holds them.
        clock, record, workspace, posted = time.monotonic_ns, self._record, self._workspace, self._posted
        position, stream = instruction.position, workspace.resources.streams.of(instruction)

        def run() -> None:
            posted_ns = clock()
            completion = issue(stream)
            times = completion.times
            if times is not None:
                record(workspace.step, position, posted_ns, times[0], times[1])
            else:
                completion.report_to(partial(record, workspace.step, position, posted_ns))
                posted.append(completion)

        return run


def all_handlers() -> dict[str, Handler]:
    """Handlers by kind: the runtime's own, and those of methods."""
    return {**HANDLERS, **{one.kind: one.handler for one in runtime_parts(HandlerOf)}}


def require_supported(program: RankProgram, handlers: Mapping[str, Handler] | None = None) -> None:
    """Refuse a program that this runtime cannot execute; call it before any process group starts.

    Raises:
        InputError: one line for everything that is not supported yet.
    """
    handlers = all_handlers() if handlers is None else handlers
    used = sorted({KINDS[int(code)].name for code in set(program.columns.kind.tolist())} - set(handlers))
    problems = [f"instructions of kind {name!r} are" for name in used]
    if len(program) and int(program.columns.iteration.min()) < 0:
        problems.append("a prologue is")
    if problems:
        raise InputError(
            [Violation("program", f"{text} not supported by this runtime yet") for text in problems]
        )


def _forget(step: int, position: int, posted_ns: int, start_ns: int, end_ns: int) -> None:
    """Times that nobody asked for."""


def _forget_step(step: int) -> None:
    """A step that nobody follows."""
