"""`Executor`: one rank's part of a Program, as a flat list of closures.

The main thread goes through the list in issue order and issues every instruction to its stream. The stream
decides who waits (`weft.run.streams`). The executor itself waits only at the end of a step, for the
unfinished work of the step before.
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
from weft.program.program import NONE, Instruction
from weft.program.rank_program import RankProgram
from weft.run.handlers import HANDLERS
from weft.run.handlers.base import COPIED, Handler, Issue
from weft.run.methods import HandlerOf, PartOfSum
from weft.run.record.recorder import Recorder
from weft.run.streams import Completion, Value
from weft.run.workspace import Batch, Workspace


class Outcome(NamedTuple):
    """The results of a step on this rank: its shares of the loss and of methods' sums, figures, and series.
    Methods' numbers are by name. The work that makes them may still run."""

    loss: PartOfSum
    shares: Mapping[str, PartOfSum]
    figures: Mapping[str, Value[torch.Tensor]]
    series: Mapping[str, Value[torch.Tensor]]

    @property
    def numbers(self) -> list[Value[torch.Tensor]]:
        """The values of the shares and the figures."""
        shares = (self.loss, *self.shares.values())
        return [*(value for share in shares for value in share.values), *self.figures.values()]


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
        self._recorder = recorder
        self._posted: list[Completion] = []
        self._in_flight: list[Completion] = []
        # The actions of each step of the cycle.
        self._actions: list[list[tuple[Instruction, Callable[[], None]]]] = [
            [] for _ in range(program.steps_per_cycle)
        ]
        self._order = workspace.resources.streams.order(program)
        for one in program.instructions():
            issue = handlers[one.kind.name](workspace, one)
            bound = self._bind(one, issue if self._order is None else self._order.ordered(one, issue))
            self._actions[one.iteration].append((one, bound))

    def run_step(self, step: int, batch: Batch) -> Outcome:
        """Execute one step, and return its outcome without waiting for all of its work.

        `step` counts from 0 over the whole job. The instructions repeat with the program's cycle of steps.

        Raises:
            RunError: names the rank, the step and the instruction. The next step reports an instruction that
                fails after its last reader.
        """
        workspace = self._workspace
        workspace.begin(step, batch)
        if self._order is not None:
            self._order.begin_step()
        if self._recorder is not None:
            self._recorder.begin(step)
        reached: Instruction | None = None
        try:
            for reached, action in self._actions[step % len(self._actions)]:  # noqa: B007
                action()
            # Sends of this step may still run. All sends of the step before have been received.
            self.drain()
        except RunError as error:
            raise type(error)(f"{self._where(reached)}: {error}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{self._where(reached)}: {reason}") from error
        self._in_flight = self._posted.copy()
        self._posted.clear()
        return self._outcome()

    def drain(self) -> None:
        """Wait for the unfinished work of the last step; afterwards all its times are known.

        Raises:
            RunError: when some of that work has failed.
        """
        for completion in self._in_flight:
            completion.wait()
        self._in_flight = []

    def step_after(self, copied: Completion) -> None:
        """Let optimizers step after the end of a copy of weights and states."""
        self._workspace.values[COPIED, NONE, NONE] = Value.of(None, copied)

    def _outcome(self) -> Outcome:
        workspace = self._workspace
        methods = workspace.resources.methods.values()
        shares = {name: share for one in methods for name, share in one.shares(workspace).items()}
        if not self._actions[workspace.step % len(self._actions)]:
            # The rank rests; its values are those of an earlier step.
            return Outcome(PartOfSum(()), dict.fromkeys(shares, PartOfSum(())), {}, {})
        return Outcome(
            PartOfSum(tuple(workspace.losses), 1.0 / workspace.step_share),
            shares,
            {name: value for one in methods for name, value in one.figures(workspace).items()},
            {name: value for one in methods for name, value in one.series(workspace).items()},
        )

    def _where(self, instruction: Instruction | None) -> str:
        return (
            f"rank {self._workspace.resources.rank}, step {self._workspace.step}, instruction {instruction}"
        )

    def _bind(self, instruction: Instruction, issue: Issue) -> Callable[[], None]:
        # No action refers to the executor: a process group ends when its last holder is freed.
        clock, workspace, posted = time.monotonic_ns, self._workspace, self._posted
        position, stream = instruction.position, workspace.resources.streams.of(instruction)
        if self._recorder is None:

            def run() -> None:
                completion = issue(stream)
                if completion.times is None:
                    posted.append(completion)

            return run
        note, record = self._recorder.issue, self._recorder.record

        def run_recorded() -> None:
            posted_ns = clock()
            # Before the issue: the host itself may hang in it.
            note(position, posted_ns)
            completion = issue(stream)
            times = completion.times
            if times is not None:
                record(workspace.step, position, posted_ns, times[0], times[1])
            else:
                completion.report_to(partial(record, workspace.step, position, posted_ns))
                posted.append(completion)

        return run_recorded


def all_handlers() -> dict[str, Handler]:
    """Return all handlers by kind: the runtime's own, and those that methods add."""
    return {**HANDLERS, **{one.kind: one.handler for one in runtime_parts(HandlerOf)}}


def require_supported(program: RankProgram, handlers: Mapping[str, Handler] | None = None) -> None:
    """Refuse a program that this runtime cannot execute; call it before any process group starts.

    Raises:
        InputError: with one line for each unsupported thing.
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
