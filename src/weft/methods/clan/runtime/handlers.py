"""The handlers of the five instructions of a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.methods.clan.kinds import BETWEEN
from weft.methods.clan.report import CONTRACTION, ERRORS
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Handler, Issue
from weft.run.methods import HandlerOf
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Meeting

Work = Callable[[TwoWaySums, torch.Tensor, Meeting], Sequence[torch.Tensor] | None]


def handler_of(work_of: Work, reads: str, writes: str, numbers: Sequence[str] = ()) -> Handler:
    """Return the handler of an instruction between two values of its piece.

    `numbers` names the results of the work. The first instruction follows the backward passes. The last one
    is the latest work on the stage's gradient.
    """

    def handle(workspace: Workspace, instruction: Instruction) -> Issue:
        stage, part, label = instruction.stage, instruction.part, str(instruction)
        resources, values = workspace.resources, workspace.values
        synchroniser, flat = resources.synchroniser, resources.buckets[stage].flat
        assert isinstance(synchroniser, TwoWaySums), "the method brings its own"

        def issue(stream: Stream) -> Completion:
            meeting = Meeting(
                group=synchroniser.group_of(stage),
                stage=stage,
                step=workspace.step,
                part=part,
                replica=instruction.replica,
                seed=resources.seed,
            )
            made: dict[str, Value[torch.Tensor]] = {name: Value() for name in numbers}

            def work() -> None:
                for value, number in zip(
                    made.values(), work_of(synchroniser, flat, meeting) or (), strict=True
                ):
                    value.content = number

            read = workspace.latest(GRADIENT, stage) if reads == GRADIENT else values[reads, stage, part]
            done = stream.run(label, work, read)
            values[writes, stage, NONE if writes == GRADIENT else part] = Value.of(None, done)
            for name, value in made.items():
                value.completion = done
                values[name, stage, NONE] = value
            return done

        return issue

    return handle


HANDLERS = (
    HandlerOf(
        kind="compress", handler=handler_of(TwoWaySums.compress, GRADIENT, BETWEEN[0], (CONTRACTION, ERRORS))
    ),
    HandlerOf(kind="push", handler=handler_of(TwoWaySums.push, BETWEEN[0], BETWEEN[1])),
    HandlerOf(kind="aggregate", handler=handler_of(TwoWaySums.aggregate, BETWEEN[1], BETWEEN[2])),
    HandlerOf(kind="pull", handler=handler_of(TwoWaySums.pull, BETWEEN[2], BETWEEN[3])),
    HandlerOf(kind="decompress", handler=handler_of(TwoWaySums.decompress, BETWEEN[3], GRADIENT)),
)
